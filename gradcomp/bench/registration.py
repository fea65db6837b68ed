"""Register the hooks that plans compare on a DDP model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.plan.candidates import Candidate, candidate_named

NOOP = "noop"
# The step from which states compress: the earliest that PowerSGD takes.
FIRST_COMPRESSED_STEP = 2


def register(model: DistributedDataParallel, name: str) -> None:
    """Register the hook of this name; nothing for "none"."""
    if name == NOOP:
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name != "none":
        model.register_comm_hook(*state_and_hook(candidate_named(name)))


def state_and_hook(candidate: Candidate) -> tuple[Any, Any]:
    """Return the state and the hook that a candidate stands for; in the default group."""
    if candidate.rank is not None:
        options = candidate.low_rank_options
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=options.rank,
            start_powerSGD_iter=FIRST_COMPRESSED_STEP,
            min_compression_rate=options.min_compression_rate,
            factor_dtype=options.factor_dtype,
            uncompressed_dtype=options.uncompressed_dtype,
        )
        return state, powerSGD_hook.powerSGD_hook
    if candidate.bits is not None:
        quantised = quantization_hooks.QuantizationState(
            bits=candidate.bits, start_iter=FIRST_COMPRESSED_STEP
        )
        return quantised, quantization_hooks.quantization_hook
    hooks = {
        None: default_hooks.allreduce_hook,
        torch.bfloat16: default_hooks.bf16_compress_hook,
        torch.float16: default_hooks.fp16_compress_hook,
    }
    return None, hooks[candidate.wire_dtype]
