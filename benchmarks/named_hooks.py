"""gradcomp's hooks by the names that benchmarks give them, as in powersgd:8:int8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradcomp.comm.bucket import Hook
from gradcomp.hooks import default_hooks
from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

MakeState = Callable[[int], Any]  # makes a state that compresses after this number of steps

STATELESS: dict[str, Hook | None] = {
    "none": None,  # the reducer's own all-reduce
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
QUANTIZED: dict[str, dict[str, int]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int4:64": {"bits": 4, "block_size": 64},
}
POWERSGD: dict[str, Hook] = {"powersgd": powerSGD_hook, "batched": batched_powerSGD_hook}
# What factors, and whatever is not compressed, are sent in.
FACTORS: dict[str, dict[str, torch.dtype]] = {
    "": {},
    "bf16": {"factor_dtype": torch.bfloat16},
    "fp16": {"factor_dtype": torch.float16},
    "int8": {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16},
}
START_BITS = {"": None, "start4": 4, "start8": 8}  # of the steps before it compresses


def named_hook(name: str) -> tuple[Hook | None, MakeState]:
    """Return the hook of this name, None for "none", and the function that makes its state.

    name: a key of STATELESS or QUANTIZED, or PowerSGD's rank, what its factors are sent in, and the bits of
        the steps before it compresses: "powersgd:4", "batched:4", "powersgd:4:int8",
        "powersgd:4:int8:start4".

    Raises ValueError for another name.
    """
    if name in STATELESS:
        return STATELESS[name], lambda start_iter: None
    if name in QUANTIZED:
        options = QUANTIZED[name]
        return quantization_hook, lambda start_iter: QuantizationState(start_iter=start_iter, **options)
    family, *given = name.split(":")
    rank, factors, start = [*given, "", "", ""][:3]
    is_known = family in POWERSGD and len(given) <= 3 and factors in FACTORS and start in START_BITS
    if not (is_known and rank.isdecimal() and int(rank)):
        powersgd = (f"{each}:RANK[:{'|'.join(filter(None, FACTORS))}[:start4|start8]]" for each in POWERSGD)
        known = ", ".join((*STATELESS, *QUANTIZED, *powersgd))
        raise ValueError(f"there is no hook {name!r}; known are {known}")
    return POWERSGD[family], partial(
        PowerSGDState, None, int(rank), start_bits=START_BITS[start], **FACTORS[factors]
    )


def register(name: str, averager: Any, start_iter: int) -> None:
    """Register the hook of this name, which compresses after start_iter steps."""
    hook, make_state = named_hook(name)
    if hook is not None:
        averager.register_comm_hook(make_state(start_iter), hook)
