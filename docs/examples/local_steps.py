"""Train by local steps: every rank takes 20 by itself, then all average how far they have gone, in 4 bits.

torchrun --nproc-per-node 2 docs/examples/local_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.local_steps import LocalSteps

EVERY, STEPS = 20, 120


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # LocalSteps copies rank 0's weights to all
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = QuantizationState(bits=4)  # its error feedback works from one exchange to the next
    local_steps = LocalSteps(model, every=EVERY, hook=quantization_hook, state=state)

    losses = []
    for _ in range(STEPS):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local_steps.step()
        losses.append(loss.item())
    local_steps.join()  # all ranks end with equal weights

    if dist.get_rank() == 0:
        sent = state.compression_stats()[0] * EVERY
        print(f"step {len(losses)}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {sent:.0f} times fewer bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
