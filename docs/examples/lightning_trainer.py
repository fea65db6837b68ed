"""Train with Lightning's Trainer and PowerSGD on two CPU processes; then resume from Lightning's checkpoint.

python docs/examples/lightning_trainer.py folder
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.frameworks.lightning import CommHookCallback
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


class Roll(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.losses = []

    def training_step(self, batch, _):
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x), x.roll(1, dims=1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, epochs, ckpt_path=None):
    pl.seed_everything(0)
    data = DataLoader(TensorDataset(torch.randn(1024, 64)), batch_size=32)
    state = PowerSGDState(None, matrix_approximation_rank=4)
    state.start_powerSGD_iter = 4  # this run is short
    callback = CommHookCallback(state, powerSGD_hook)
    model = Roll()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    if trainer.is_global_zero:
        rate = state.compression_stats()[0]
        first, last = model.losses[0], model.losses[-1]
        print(f"step {state.iter}: loss {first:.3f} to {last:.3f}, {rate:.1f} times fewer bytes", flush=True)


if __name__ == "__main__":
    fit(sys.argv[1], epochs=3)
    fit(sys.argv[1], epochs=6, ckpt_path=f"{sys.argv[1]}/run.ckpt")
