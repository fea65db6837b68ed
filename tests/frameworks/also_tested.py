"""Train as users of frameworks do beside the recipes, on the ranks of torchrun.

torchrun --nproc-per-node 2 tests/frameworks/also_tested.py accelerate|lightning|transformers folder
"""

import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.optim  # before a process group exists, which some of torch's functions would keep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradcomp
from gradcomp.frameworks import CommHook
from gradcomp.hooks.default_hooks import allreduce_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_runs import Messages


def same_on_all_ranks(tensors):
    mine = torch.cat([tensor.flatten() for tensor in tensors])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(mine, each) for each in all_of_them)


def new_layers():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = new_layers(), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def in_accelerate(folder):
    """Two models, each with a hook of its own and a layer that it leaves out; save and load the states."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    states = [PowerSGDState(None, 2, 2), QuantizationState(bits=4)]
    models, optimizers = [], []
    for state, hook in zip(states, (powerSGD_hook, quantization_hook), strict=True):
        model = accelerator.prepare(PartlyUsed())
        comm_hook = CommHook(state, hook)
        comm_hook.register(model)
        accelerator.register_for_checkpointing(comm_hook)
        models.append(model)
        optimizers.append(accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            accelerator.backward((model(x) - x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [state.iter for state in states] == [4, 4]
    same_on_all_ranks([parameter for model in models for parameter in model.parameters()])
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    for state in states:
        state.iter = 0
    accelerator.load_state(folder)
    assert [state.iter for state in states] == [4, 4]
    through_accelerates_option()


def through_accelerates_option():
    """Let Accelerate find gradcomp's hook under the name of torch's."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_state_option={"matrix_approximation_rank": 4, "start_powerSGD_iter": 10},
    )
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    model = new_layers()
    with gradcomp.apply_to_torch():
        model = accelerator.prepare(model)
    with Messages("gradcomp") as said:
        for _ in range(12):
            accelerator.backward(model(torch.randn(8, 16)).square().mean())
    # Torch's hook says nothing.
    assert dist.get_rank() > 0 or any("compresses from step 10 on" in each for each in said)
    same_on_all_ranks([parameter.grad for parameter in model.parameters()])


def in_lightning(folder):
    """Fit, test and fit a GAN with two optimizers, clipping, early stopping; the callback between others."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from gradcomp.frameworks.lightning import CommHookCallback

    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = new_layers(), nn.Linear(16, 1)

        def training_step(self, batch, _):
            for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
                self.toggle_optimizer(optimizer)
                loss = sign * self.discriminator(self.generator(batch[0])).tanh().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 1.0)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.log("constant", 1.0)

        def test_step(self, batch, index):
            self.log("tested", self.discriminator(self.generator(batch[0])).mean(), sync_dist=True)

        def configure_optimizers(self):
            parts = self.generator, self.discriminator
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    state = PowerSGDState(None, 2, 2)
    data = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8)
    stopping = EarlyStopping("constant", patience=1, check_on_train_epoch_end=True)
    trainer = pl.Trainer(
        strategy="ddp_find_unused_parameters_true", accelerator="cpu", devices=2, max_epochs=10, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[stopping, CommHookCallback(state, powerSGD_hook), ModelCheckpoint(folder)],
    )  # fmt: skip
    model = Gan()
    trainer.fit(model, data)
    assert 0 < trainer.current_epoch < 10, "early stopping stops"
    steps = state.iter
    # Every epoch has 2 batches per rank and 2 backwards for each.
    assert steps == 4 * trainer.current_epoch
    trainer.test(model, data, verbose=False)
    assert state.iter == steps
    trainer.fit_loop.max_epochs = trainer.current_epoch + 2
    trainer.should_stop = False
    trainer.callbacks[0].wait_count = -10
    trainer.fit(model, data)
    assert state.iter > steps
    same_on_all_ranks(list(model.parameters()))


def in_transformers(folder):
    """Resume with resume_from_checkpoint=True from a checkpoint of save_only_model=True.

    Average gradients with num_items_in_batch: they are means over all tokens.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gradcomp.frameworks.transformers import FILE_NAME, CommHookCallback

    def train(max_steps, resume):
        arguments = TrainingArguments(
            output_dir=f"{folder}/run", max_steps=max_steps, per_device_train_batch_size=4,
            save_steps=2, save_only_model=True, report_to="none", disable_tqdm=True, use_cpu=True,
            ddp_backend="gloo", ddp_find_unused_parameters=True,
        )  # fmt: skip
        torch.manual_seed(0)
        data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))]
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
        trainer, state = Trainer(model, arguments, train_dataset=data), QuantizationState(bits=4)
        trainer.add_callback(CommHookCallback(trainer, state, quantization_hook))
        trainer.train(resume_from_checkpoint=resume)
        assert state.iter == max_steps
        same_on_all_ranks(list(model.parameters()))

    train(4, resume=False)
    assert (Path(folder) / "run" / "checkpoint-4" / FILE_NAME).exists()
    train(6, resume=True)
    weigh_by_tokens(folder)


def weigh_by_tokens(folder):
    """Train on rows that end after 1 to 15 tokens; compare averages with float64 means over all tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from gradcomp.frameworks.transformers import CommHookCallback

    class Comparing(TrainerCallback):
        """Compares averages with what they should be, from this step's inputs in seen."""

        num_steps = 0

        def on_pre_optimizer_step(self, *_, **__):
            wide = copy.deepcopy(model).double()
            number = torch.zeros((), dtype=torch.float64)
            for inputs, labels in seen:
                logits, targets = wide(inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
                number += (targets != -100).sum()
            seen.clear()
            dist.all_reduce(number)
            summed = torch.cat([each.grad.flatten() for each in wide.parameters()])
            dist.all_reduce(summed)
            found = torch.cat([each.grad.flatten().double() for each in model.parameters()])
            assert (found - summed / number).norm() < 1e-5 * found.norm()
            self.num_steps += 1

    def note(_, arguments, inputs):
        if torch.is_grad_enabled() and inputs.get("labels") is not None:
            seen.append((inputs["input_ids"], inputs["labels"]))

    arguments = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, max_grad_norm=0.0, report_to="none", disable_tqdm=True, use_cpu=True,
        save_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(64, (64, 16))
    places, ends = torch.arange(16), torch.randint(2, 17, (64, 1))
    data = [
        # No first label: nothing predicts it, but the Trainer may count it.
        {"input_ids": row, "labels": row.where((places > 0) & (places < end), -100)}
        for row, end in zip(tokens, ends, strict=True)
    ]
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model, seen, comparing = GPT2LMHeadModel(config), [], Comparing()
    model.register_forward_pre_hook(note, with_kwargs=True)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(CommHookCallback(trainer, None, allreduce_hook))
    trainer.add_callback(comparing)
    trainer.train()
    assert comparing.num_steps == 6


if __name__ == "__main__":
    cases = {"accelerate": in_accelerate, "lightning": in_lightning, "transformers": in_transformers}
    cases[sys.argv[1]](sys.argv[2])
    gc.collect()  # models hold the process group, whose threads must end before Python does
    dist.barrier()
    dist.destroy_process_group()
    print("all of it works")
