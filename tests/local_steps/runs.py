"""Hooks and outer optimizers of LocalSteps in tests."""

import torch

from gradcomp.hooks import AutoState, QuantizationState, auto_hook, default_hooks, quantization_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

HOOKS = {
    "bf16": lambda group: (default_hooks.bf16_compress_hook, group),
    "int4": lambda group: (quantization_hook, QuantizationState(group, bits=4, block_size=16)),
    "int8": lambda group: (quantization_hook, QuantizationState(group, bits=8, block_size=16)),
    "PowerSGD": lambda group: (powerSGD_hook, PowerSGDState(group, 1, 2, min_compression_rate=1)),
    "auto": lambda group: (auto_hook, AutoState(group)),
}


def hooked(name, group):
    """Return options of LocalSteps: a hook and its state, or the process group without a hook, "none"."""
    if name == "none":
        return {"process_group": group}
    return dict(zip(("hook", "state"), HOOKS[name](group), strict=True))


@torch.no_grad()
def move(model, rank, number, scale=1.0):
    """Move the weights as if this rank had learned. Returns the moves by name."""
    moves = {}
    for name, each in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * number + rank)
        moves[name] = scale * torch.randn(each.shape, generator=generator).to(each.dtype)
        each += moves[name]
    return moves


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def learn(model, local_steps, rank, numbers):
    """Take steps. Returns the moves of each."""
    moves = []
    for number in numbers:
        moves.append(move(model, rank, number))
        local_steps.step()
    return moves


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[each], other[each]) for each in one)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
