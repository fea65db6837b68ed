"""Hooks for models that a framework wraps: Accelerate, Fabric, Lightning, Transformers, Ray.

gradcomp.frameworks.lightning, .torchft and .transformers, which need a package each, are imported by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from gradcomp.comm.bucket import require_hook
from gradcomp.comm.torch_private import overflows_of
from gradcomp.compress import consolidated_state_dict
from gradcomp.compress.state import CompressorState
from gradcomp.parallel import DistributedDataParallel

__all__ = ["CommHook"]


class CommHook:
    """A hook and its state, for the DDP inside a framework's model: registered, saved and restored together.

    state, hook: as for register_comm_hook. A state without memory (None, a process group) isn't saved.

    A framework that checkpoints objects with state_dict() and load_state_dict() can checkpoint a CommHook.

    Example, with Accelerate::

        comm_hook = CommHook(QuantizationState(bits=4), quantization_hook)
        model, optimizer = accelerator.prepare(model, optimizer)
        comm_hook.register(model)
        accelerator.register_for_checkpointing(comm_hook)
    """

    def __init__(self, state: Any, hook: Callable[[Any, dist.GradBucket], Any]):
        require_hook(hook, state, "CommHook")
        self.state, self.hook = state, hook
        self._registered_on: weakref.ref[nn.Module] | None = None
        # At the last follow(): the scaler, its record of optimizers' overflows, and the step's number.
        self._followed: tuple[Any, dict[int, Any] | None, int] = (None, None, 0)

    def register(self, model: nn.Module) -> None:
        """Register the hook on the DistributedDataParallel, torch's or ours, that a model is or contains.

        A second call for one DistributedDataParallel does nothing. On a single rank, nothing happens to a
        model without one: there is nothing to average.

        Raises ValueError for a model with several, and on several ranks for a model without one. Raises
        RuntimeError if another hook is registered.
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
            if self.has_memory:
                self.state.number_parameters(found[0].module.named_parameters())
            found[0].register_comm_hook(self.state, self.hook)
            self._registered_on = weakref.ref(found[0])

    @property
    def has_memory(self) -> bool:
        """Whether the state compresses, and so has errors to save and to rescale."""
        return isinstance(self.state, CompressorState)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a file that all ranks load; see consolidated_state_dict. A collective.

        The dict is empty for a state without memory, and if there is no process group.
        """
        if not (self.has_memory and dist.is_initialized()):
            return {}
        self._take_back_skipped()
        return consolidated_state_dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict(), before the model's first step. An empty dict changes nothing.

        Raises ValueError for a state without memory, and the errors of the state's load_state_dict.
        """
        if not state_dict:
            return
        if not self.has_memory:
            raise ValueError(
                f"the checkpoint has a compressing hook's state ({', '.join(state_dict)}), but this hook's "
                f"state is {self.state!r}"
            )
        self.state.load_state_dict(state_dict)

    def follow(self, scaler: Any) -> None:
        """Follow a GradScaler: take back the step that it skipped, and rescale the errors to its scale.

        scaler: has get_scale(), the gradients' scale in the coming backward; None if gradients aren't scaled.

        Call this at the beginning of every step, from the first one on, and after loading a checkpoint.
        Errors that the state's own load_state_dict loads without a scale are taken to have the first call's.

        Sets the state's keep_undo. After a step that torch's GradScaler, or every optimizer between two of
        its updates, has skipped, errors, directions and the number of steps are again what they were before
        that step's last backward.

        Raises RuntimeError if steps were averaged before the first call: their errors' scale is unknown.
        """
        if not self.has_memory:
            return
        self._take_back_skipped()  # before rescaling: what was kept has the old scale
        if self.state.gradient_scale is None and scaler is not None and self.state.is_compared:
            raise RuntimeError(
                f"CommHook.follow is called for the first time after {self.state.iter} steps, so the scale "
                "of the errors is unknown. Likely cause: it is called after the scaler's update "
                "only. Call comm_hook.follow(scaler) at the beginning of every step, before backward"
            )
        self.state.gradient_scale = 1.0 if scaler is None else scaler.get_scale()
        overflows = overflows_of(scaler)
        self._followed = scaler, overflows, self.state.iter
        if overflows is not None:
            self.state.keep_undo = True

    def _take_back_skipped(self) -> None:
        """Take the step after the last follow() back, if the scaler has made its optimizers skip it.

        The scale doesn't tell: a program may set it, or keep it from falling, and one optimizer may skip
        while another steps. An update replaces the scaler's record by a new one, so the old one can be read
        here. It holds for each optimizer how many devices found inf or NaN, the same on every rank. The
        update has added the other optimizers' numbers to the first one's; not so update(new_scale), after
        which a step that several optimizers have skipped is not taken back.
        """
        scaler, overflows, step = self._followed
        if not overflows or overflows is overflows_of(scaler):
            return
        counts = [sum(map(float, each["found_inf_per_device"].values())) for each in overflows.values()]
        if all(counts) and counts[0] > sum(counts[1:]) and self.state.iter > step:
            self._followed = scaler, None, step  # not a second time
            self.state.undo_step()  # of several backwards that added to gradients, the last
