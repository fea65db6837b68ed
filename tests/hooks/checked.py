"""Every hook, with the error that it is allowed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.named_hooks import NamedHook

# The steps of a run with error feedback. The first ones are plain, as DDP rebuilds its buckets.
NUM_STEPS_WITH_ERROR, NUM_PLAIN_STEPS = 10, 2


@dataclass(frozen=True)
class HookCheck:
    """A hook (or None) and its allowed error.

    dtype: the narrowest dtype between gradients and averages.
    averages: whether the hook averages at all.
    step_error: the error allowed in a step, over the largest gradient; by default that of rounding to dtype.
    make_state: makes the state of a hook with error feedback. Its state_dict() is like PowerSGDState's.
    """

    make: Callable[[], Callable | None]
    dtype: torch.dtype = torch.float32
    averages: bool = True
    make_state: Callable[[], Any] | None = None
    step_error: float | None = None

    @property
    def max_error(self) -> float:
        """The error allowed in a step, or with error feedback in their sum, over the largest gradient."""
        # Each rank rounds its own gradient (half an eps), the sum is rounded and so is the division: eps and
        # a half; doubled for backward's own noise.
        each_step = self.step_error or 3 * torch.finfo(self.dtype).eps
        return NUM_STEPS_WITH_ERROR * each_step if self.make_state else each_step


def _power_sgd_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=NUM_PLAIN_STEPS, **options
    )


def _power_sgd_state_with_nodes() -> powerSGD_hook.PowerSGDState:
    """Return a state with int8 factors: others are averaged hierarchically on a CPU alone."""
    return _power_sgd_state(factor_dtype=torch.int8, start_bits=8, ranks_per_node=_node_size())


def _node_size() -> int:
    """Return the ranks of a node: two, so that two ranks are one node, if they fill the nodes."""
    return 2 if dist.get_world_size() % 2 == 0 else 1


def _state_with_nodes(**options: Any) -> quantization_hooks.QuantizationState:
    return _quantization_state(ranks_per_node=_node_size(), **options)


def _auto_state() -> AutoState:
    """Return a state that tries each candidate in the checked steps. One rank alone uses the first."""
    return AutoState(
        None, ("int4", "none", "powersgd:4"), start_iter=NUM_PLAIN_STEPS, steps_per_turn=3, rounds=1
    )


def _sixteen_bits_hook() -> Callable:
    """Return a hook with a state of its own, which keeps no errors."""
    state = quantization_hooks.QuantizationState(bits=16)
    return lambda _, bucket: quantization_hooks.quantization_hook(state, bucket)


def _hierarchical_all_reduce() -> Callable:
    """Return a hook with a state of its own, which keeps no errors."""
    hook = NamedHook.form_named("allreduce hierarchical")
    state, compress = hook.state_and_hook(NUM_PLAIN_STEPS, _node_size())
    return lambda _, bucket: compress(state, bucket)


_quantization_state = partial(quantization_hooks.QuantizationState, None, start_iter=NUM_PLAIN_STEPS)

HOOKS = {
    "allreduce_hook": HookCheck(lambda: default_hooks.allreduce_hook),
    "fp16_compress_hook": HookCheck(lambda: default_hooks.fp16_compress_hook, torch.float16),
    "bf16_compress_hook": HookCheck(lambda: default_hooks.bf16_compress_hook, torch.bfloat16),
    # Around a hook of torch's: around gradcomp's the wrappers are the two hooks above.
    "fp16_compress_wrapper": HookCheck(
        lambda: default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook), torch.float16
    ),
    "bf16_compress_wrapper": HookCheck(
        lambda: default_hooks.bf16_compress_wrapper(torch_hooks.allreduce_hook), torch.bfloat16
    ),
    # A wrapper's stages wait for the stages of the hook within.
    "fp16_compress_wrapper of quantization_pertensor_hook": HookCheck(
        lambda: default_hooks.fp16_compress_wrapper(quantization_hooks.quantization_pertensor_hook),
        step_error=0.07,
    ),
    "bf16_compress_wrapper of fp16_compress_wrapper": HookCheck(
        lambda: default_hooks.bf16_compress_wrapper(
            default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)
        ),
        torch.bfloat16,
    ),
    "noop_hook": HookCheck(lambda: debugging_hooks.noop_hook, averages=False),
    "powerSGD_hook": HookCheck(lambda: powerSGD_hook.powerSGD_hook, make_state=_power_sgd_state),
    "batched_powerSGD_hook": HookCheck(
        lambda: powerSGD_hook.batched_powerSGD_hook, make_state=_power_sgd_state
    ),
    "powerSGD_hook int8 hierarchical": HookCheck(
        lambda: powerSGD_hook.powerSGD_hook, make_state=_power_sgd_state_with_nodes
    ),
    "quantization_hook int8": HookCheck(
        lambda: quantization_hooks.quantization_hook, make_state=partial(_quantization_state, bits=8)
    ),
    "quantization_hook int4": HookCheck(
        lambda: quantization_hooks.quantization_hook, make_state=partial(_quantization_state, bits=4)
    ),
    "quantization_hook int4 hierarchical": HookCheck(
        lambda: quantization_hooks.quantization_hook, make_state=partial(_state_with_nodes, bits=4)
    ),
    "auto_hook": HookCheck(lambda: auto_hook, make_state=_auto_state),
    "quantization_hook 16 bits": HookCheck(lambda: _sixteen_bits_hook(), torch.bfloat16),
    "allreduce hierarchical": HookCheck(lambda: _hierarchical_all_reduce()),
    # Senders and owner each lose half of a 127th of a block's largest value, and 2⁻⁸ by rounding the scale:
    # 0.016, and more of a bias, which shares blocks with weights that have larger gradients. Measured 0.048.
    "quantization_pertensor_hook": HookCheck(
        lambda: quantization_hooks.quantization_pertensor_hook, step_error=0.07
    ),
    "quantization_perchannel_hook": HookCheck(
        lambda: quantization_hooks.quantization_perchannel_hook, step_error=0.07
    ),
}
