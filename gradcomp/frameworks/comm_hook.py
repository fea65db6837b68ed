"""A communication hook with its state, for models that a framework wraps and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from gradcomp.compress import consolidated_state_dict
from gradcomp.compress.state import CompressedAveraging
from gradcomp.parallel import DistributedDataParallel


class Scaler(Protocol):
    """A GradScaler, of which the scale is read."""

    def get_scale(self) -> float: ...


class CommHook:
    """A hook and its state, to be registered on the DDP inside a framework's model, saved and restored.

    state, hook: as for register_comm_hook. A state that a hook needs no memory for (None, a process group) is
    neither saved nor rescaled.

    It has state_dict() and load_state_dict(), so what checkpoints objects with these takes it as it is.

    Example, with Accelerate::

        comm_hook = CommHook(QuantizationState(bits=4), quantization_hook)
        model, optimizer = accelerator.prepare(model, optimizer)
        comm_hook.register(model)
        accelerator.register_for_checkpointing(comm_hook)
    """

    def __init__(self, state: Any, hook: Callable[[Any, dist.GradBucket], Any]):
        if not callable(hook):
            raise TypeError(f"CommHook takes a state and a hook, in this order; its hook is {hook!r}")
        self.state, self.hook = state, hook
        self._registered_on: weakref.ref[nn.Module] | None = None
        self._scale: float | None = None

    def register(self, model: nn.Module) -> None:
        """Register the hook on the DistributedDataParallel, torch's or ours, that a model is or contains.

        A second call for the same one does nothing. A model without one is left as it is where there is only
        one rank: nothing is to be averaged.

        Raises ValueError for a model with several of them, and for one without on several ranks; RuntimeError
        where another hook is registered.
        """
        found = [each for each in model.modules() if isinstance(each, TorchsDDP | DistributedDataParallel)]
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if not found and num_ranks == 1:
            return
        if len(found) != 1:
            raise ValueError(
                f"{type(model).__name__} contains {len(found) or 'no'} DistributedDataParallel, but a hook "
                f"is registered on one. There are {num_ranks} ranks; likely cause: the model is not wrapped "
                "yet, or a strategy other than DDP wraps it (for FSDP2 see gradcomp.fsdp)"
            )
        if self._registered_on is None or self._registered_on() is not found[0]:
            if self._has_memory:
                self.state.number_parameters(found[0].module.named_parameters())
            found[0].register_comm_hook(self.state, self.hook)
            self._registered_on = weakref.ref(found[0])

    @property
    def _has_memory(self) -> bool:
        return isinstance(self.state, CompressedAveraging)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a file that all ranks load: consolidated_state_dict of it. A collective.

        Empty for a state without memory, and where there is no process group.
        """
        if self._has_memory and dist.is_initialized():
            return consolidated_state_dict(self.state)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict(), before the model's first step. An empty one leaves the state as it is.

        Raises what the state's load_state_dict raises; ValueError where the state is one without memory.
        """
        if not state_dict:
            return
        if not self._has_memory:
            raise ValueError(
                f"the checkpoint has a compressing hook's state ({', '.join(state_dict)}), but this hook's "
                f"state is {self.state!r}"
            )
        self.state.load_state_dict(state_dict)

    def follow(self, scaler: Scaler | None) -> None:
        """Rescale the errors if a GradScaler has changed its scale since the last call.

        Call it after every update. scaler: None where there is none. See rescale_errors of the states.
        """
        if scaler is None or not self._has_memory:
            return
        before, self._scale = self._scale, scaler.get_scale()
        if before is not None:
            self.state.rescale_errors(self._scale / before)
