"""Compile the model, then wrap it; or wrap it, then compile: gradients in 4 bits either way.

torchrun --nproc-per-node 2 docs/examples/torch_compile.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.frameworks import CommHook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


def train(name, wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = QuantizationState(bits=4)
    CommHook(state, quantization_hook).register(model)  # finds the DDP inside
    losses = []
    for step in range(50):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        text = f"step {state.iter}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:.1f} times fewer bytes"
        print(f"{name}, {text}")


def main():
    dist.init_process_group("gloo")
    train("compiled, then wrapped", lambda model: DistributedDataParallel(torch.compile(model)))
    train("wrapped, then compiled", lambda model: torch.compile(DistributedDataParallel(model)))
    # What is compiled holds the process group, whose threads must end before Python does.
    torch.compiler.reset()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
