"""Check that Lightning's and Transformers' callbacks know the scale of every backward, after a resume too.

python tests/frameworks/followed_scale.py lightning|transformers folder
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def scaler_of(init_scale):
    """Return a scaler that changes its scale in every step."""
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1)


def in_lightning(folder):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    from gradcomp.frameworks.lightning import CommHookCallback

    class TwoOptimizerSteps(pl.LightningModule):
        def __init__(self, is_manual):
            super().__init__()
            self.automatic_optimization = not is_manual
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, _):
            if self.automatic_optimization:
                return self.layer(batch[0]).square().mean()
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.layer(batch[0]).square().mean())
                self.optimizers().step()
            return None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Checked(CommHookCallback):
        def on_before_backward(self, trainer, *arguments):
            super().on_before_backward(trainer, *arguments)
            scale = trainer.precision_plugin.scaler.get_scale()
            assert self.state.gradient_scale == scale
            scales.append(scale)

    def fit(epochs, init_scale, is_manual, ckpt_path=None):
        precision = MixedPrecision("16-mixed", "cpu", scaler=scaler_of(init_scale))
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", plugins=[precision], default_root_dir=folder, logger=False,
            callbacks=[Checked(QuantizationState(), quantization_hook)], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)
        trainer.fit(TwoOptimizerSteps(is_manual), data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(f"{folder}/run.ckpt")

    for is_manual in (False, True):
        scales = []
        fit(1, 2.0, is_manual)
        fit(2, 1024.0, is_manual, ckpt_path=f"{folder}/run.ckpt")
        assert scales == [2.0 ** (1 + step) for step in range(8 if is_manual else 4)]


def in_transformers(folder):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from gradcomp.frameworks.transformers import CommHookCallback

    class Scaling(TrainerCallback):
        """Gives the Trainer a scaler that changes its scale in every step; on a CPU, it has no scaler."""

        def on_train_begin(self, *_, **__):
            trainer.accelerator.scaler = scaler_of(2.0)

        def on_step_end(self, *_, **__):
            scaler = trainer.accelerator.scaler
            assert callback.state.gradient_scale == scaler.get_scale()
            scales.append(scaler.get_scale())
            scaler.update(2 * scaler.get_scale())

    scales = []
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    arguments = TrainingArguments(
        output_dir=folder, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    trainer = Trainer(model, arguments, train_dataset=data)
    callback = CommHookCallback(trainer, QuantizationState(), quantization_hook)
    trainer.add_callback(callback)
    trainer.add_callback(Scaling())
    trainer.train()
    assert scales == [2.0, 4.0, 8.0]


if __name__ == "__main__":
    {"lightning": in_lightning, "transformers": in_transformers}[sys.argv[1]](sys.argv[2])
    print("every scale was known")
