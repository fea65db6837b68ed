"""Train with Lightning Fabric on two CPU processes, gradients in 4 bits; resume from Fabric's checkpoint.

python docs/examples/lightning_fabric.py folder
"""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn

from gradcomp.frameworks import CommHook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def train(fabric, path, resume):
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    comm_hook = CommHook(QuantizationState(bits=4), quantization_hook)
    comm_hook.register(model)

    if resume:
        fabric.load(path, {"model": model, "optimizer": optimizer, "compression": comm_hook})
    state, losses = comm_hook.state, []
    for step in range(state.iter, state.iter + 50):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))[fabric.global_rank :: 2]
        for part, half in enumerate(x.chunk(2)):
            with fabric.no_backward_sync(model, enabled=part == 0):  # gradients accumulate
                loss = nn.functional.mse_loss(model(half), half.roll(1, dims=1)) / 2
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(2 * loss.item())
    fabric.save(path, {"model": model, "optimizer": optimizer, "compression": comm_hook})
    rate = state.compression_stats()[0]
    fabric.print(
        f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes",
        flush=True,
    )


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train(fabric, f"{sys.argv[1]}/run.ckpt", resume=False)
    train(fabric, f"{sys.argv[1]}/run.ckpt", resume=True)
    fabric.barrier()
