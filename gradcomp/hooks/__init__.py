"""DDP communication hooks under the names of ``torch.distributed.algorithms.ddp_comm_hooks``.

Replace torch's package name by ``gradcomp.hooks`` in an import of default_hooks, powerSGD_hook,
quantization_hooks or debugging_hooks; nothing else changes. Torch's other hook modules are not included.
The states and hooks can be imported from here, too; but powerSGD_hook is the module with this hook, as in
torch's layout: ``powerSGD_hook.powerSGD_hook``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from gradcomp.compress.state import CompressorState

from . import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from .auto_hook import AutoState, auto_hook
from .default_hooks import bf16_compress_hook, fp16_compress_hook
from .powerSGD_hook import PowerSGDState
from .quantization_hooks import QuantizationState, quantization_hook

__all__ = [
    "AutoState",
    "DDPCommHookType",
    "PowerSGDState",
    "QuantizationState",
    "auto_hook",
    "bf16_compress_hook",
    "debugging_hooks",
    "default_hooks",
    "fp16_compress_hook",
    "powerSGD_hook",
    "quantization_hook",
    "quantization_hooks",
    "register_ddp_comm_hook",
]


@dataclass(frozen=True)
class _Registration:
    """A DDPCommHookType's value: a call registers one hook on a model. Arguments are torch's.

    make_state: makes the hook's state from a process group; None for a hook whose state is the group.
    """

    hook: Callable[..., Any]
    make_state: Callable[..., CompressorState] | None = None

    def __call__(self, model: Any, state: Any = None, **options: Any) -> None:
        if self.make_state is not None:
            state = self.make_state(state, **options)
            if isinstance(model, nn.Module):
                state.number_parameters(model.named_parameters())
        model.register_comm_hook(state, self.hook)


def _power_sgd(hook: Callable[..., Any], rank: int) -> _Registration:
    return _Registration(hook, partial(PowerSGDState, matrix_approximation_rank=rank))


class DDPCommHookType(Enum):
    """The hooks by name.

    ``DDPCommHookType.FP16_COMPRESS.value(model=ddp_model, state=process_group)`` registers one.
    """

    ALLREDUCE = _Registration(default_hooks.allreduce_hook)
    FP16_COMPRESS = _Registration(default_hooks.fp16_compress_hook)
    BF16_COMPRESS = _Registration(default_hooks.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Registration(quantization_hooks.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(quantization_hooks.quantization_perchannel_hook)
    POWER_SGD = _power_sgd(powerSGD_hook.powerSGD_hook, rank=1)
    POWER_SGD_RANK2 = _power_sgd(powerSGD_hook.powerSGD_hook, rank=2)
    BATCHED_POWER_SGD = _power_sgd(powerSGD_hook.batched_powerSGD_hook, rank=1)
    BATCHED_POWER_SGD_RANK2 = _power_sgd(powerSGD_hook.batched_powerSGD_hook, rank=2)
    NOOP = _Registration(debugging_hooks.noop_hook)
    AUTO = _Registration(auto_hook, AutoState)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register one of DDPCommHookType's hooks on a DDP model.

    comm_hook_type: the hook.
    model: any object with DDP's ``register_comm_hook``.
    state: the hook's process group, or None for the default one.
    """
    comm_hook_type.value(model=model, state=state)


TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_MODULES = ("", ".default_hooks", ".powerSGD_hook", ".quantization_hooks", ".debugging_hooks")


def apply_to_torch() -> AbstractContextManager[Any]:
    """Replace the hooks in torch.distributed.algorithms.ddp_comm_hooks by gradcomp's.

    A call alone replaces them for good; in a with statement, until the block ends. Use it with code that
    looks up torch's hooks by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    torch's and gradcomp's modules share is replaced, and so are DDPCommHookType and register_ddp_comm_hook.
    Names imported before keep torch's hooks. A hook that is registered on a model stays there.

    The names change in all threads. The end of a block puts back what was there at its beginning.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    with ExitStack() as block:
        for name in _MODULES:
            torchs, ours = import_module(TORCHS_PACKAGE + name), import_module(f"gradcomp.hooks{name}")
            for each in ours.__all__:
                if callable(before := getattr(torchs, each, None)):  # the package also has its modules
                    block.callback(setattr, torchs, each, before)
                    setattr(torchs, each, getattr(ours, each))
        return block.pop_all()


# torch.load's safe default accepts a checkpoint that names these states and hooks.
torch.serialization.add_safe_globals(
    [AutoState, PowerSGDState, QuantizationState, *(kind.value.hook for kind in DDPCommHookType)]
)
