"""Train with Accelerate and PowerSGD, accumulating and clipping; then resume from Accelerate's checkpoint.

torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py folder
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.frameworks import CommHook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def train(folder, resume):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # on GPUs without cpu=True
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(2048, 64)), batch_size=32, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    comm_hook = CommHook(PowerSGDState(None, matrix_approximation_rank=4), powerSGD_hook)
    comm_hook.register(model)
    state = comm_hook.state
    state.start_powerSGD_iter = 4  # this run is short
    accelerator.register_for_checkpointing(comm_hook)
    if resume:
        accelerator.load_state(folder)

    losses = []
    for _ in range(2):
        for (x,) in data:
            comm_hook.follow(accelerator.scaler)  # with mixed_precision="fp16"
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.save_state(folder)
    rate = state.compression_stats()[0]
    accelerator.print(
        f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes"
    )
    accelerator.free_memory()


if __name__ == "__main__":
    train(sys.argv[1], resume=False)
    train(sys.argv[1], resume=True)
    Accelerator(cpu=True).end_training()
