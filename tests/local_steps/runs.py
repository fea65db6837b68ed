"""Hooks and outer optimizers of LocalSteps in tests."""

import torch

from gradcomp.hooks import default_hooks
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

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


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
