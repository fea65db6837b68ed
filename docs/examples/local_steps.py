"""Train by local steps (DiLoCo): every rank takes 20 by itself, then all average what changed, in 4 bits.

torchrun --nproc-per-node 2 docs/examples/local_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

from gradcomp import average_
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

LOCAL_STEPS = 20
OUTER_STEPS = 6


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    weights = [weight.detach() for weight in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    common = [weight.clone().requires_grad_() for weight in weights]  # what all ranks have in common
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    state = QuantizationState(bits=4)  # its error feedback works between the outer steps

    data = torch.Generator().manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(OUTER_STEPS):
        for _ in range(LOCAL_STEPS):
            x = torch.randn(32, 64, generator=data)
            loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
            inner.zero_grad()
            loss.backward()
            inner.step()
            losses.append(loss.item())
        # The pseudo-gradients: how far the local steps have gone, averaged.
        moved = [before.detach() - weight for before, weight in zip(common, weights, strict=True)]
        average_(moved, quantization_hook, state, keys=names)
        for weight, gradient in zip(common, moved, strict=True):
            weight.grad = gradient
        outer.step()
        for weight, new in zip(weights, common, strict=True):
            weight.copy_(new.detach())

    if dist.get_rank() == 0:
        rate = state.compression_stats()[0]
        sent = rate * LOCAL_STEPS
        print(f"step {len(losses)}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {sent:.0f} times fewer bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
