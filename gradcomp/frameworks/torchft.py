"""torchft's DistributedDataParallel with a hook: replicas that come and go.

    manager.start_quorum()          the Manager's group gets the replicas that are there
    loss.backward()                 every bucket waits for the quorum, and is averaged with the hook
    manager.should_commit()         the optimizer steps, unless a replica has reported an error

With the first bucket of a new group, a replica takes its last step back if it has failed or wasn't committed.
Then all take the number of steps and the directions of a replica that has gone furthest. A replica that did
not have them already starts with errors of zero.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn

from gradcomp.comm.bucket import Hooked
from gradcomp.comm.pipeline import end_backward
from gradcomp.comm.process_group import device_for
from gradcomp.compress.agreement import furthest, take_over
from gradcomp.compress.state import CompressorState
from gradcomp.rules import described

__all__ = ["DistributedDataParallel", "group_of_quorum"]

_logger = logging.getLogger(__name__)


def group_of_quorum(manager: torchft.Manager, pg: torchft.ProcessGroupGloo) -> dist.ProcessGroup:
    """Wait for the manager's quorum, after start_quorum, and return the process group of its replicas.

    pg: the Manager's process group.

    The group ends when a quorum has other replicas, or after an error: then this returns another one. A
    Reducer and LocalSteps take it as their process group, and LocalSteps.regroup takes the next one.

    Raises TypeError for another pg; RuntimeError if the Manager could not make the group.
    """
    _require_gloo("group_of_quorum", pg)
    manager.wait_quorum()
    try:
        parent: dist.ProcessGroup = pg.parent
    except AssertionError as error:
        raise RuntimeError(
            f"{pg} has no process group after the quorum. Likely causes: the Manager has another pg, or "
            f"could not connect the replicas: {manager.errored()}"
        ) from error
    return parent


def _require_gloo(whose: str, pg: Any) -> None:
    if not isinstance(pg, torchft.ProcessGroupGloo):
        raise TypeError(
            f"{whose} takes the Manager's ProcessGroupGloo as its pg, got {described(pg)}. The time-outs of "
            "torchft's other groups don't end a hook's collectives when a replica dies"
        )


class DistributedDataParallel(torchft.DistributedDataParallel):  # type: ignore[misc]  # torchft has no types
    """torchft's DistributedDataParallel, which averages gradients with a hook.

    manager: the Manager. Its state_dict functions copy the model and the optimizer, not the hook's state.
    pg: the Manager's process group.
    module: the model.
    state, hook: as for register_comm_hook; one state per model. The state gets each quorum's group as its
        process_group, and keep_undo = True; other states than gradcomp's aren't taken back after a refused
        step. None if the hook's state is a process group.
    kwargs: as for torchft's DistributedDataParallel.

    Call manager.should_commit() after every averaged backward, as torchft's Optimizer does. The hook's errors
    are logged and go to manager.report_error: backward doesn't raise them. The Manager's max_retries ends a
    run in which they recur. All replicas must use the same parameters in a step: torchft's DDP gives one that
    a replica doesn't use no gradient there.

    Raises TypeError for another pg.

    Example::

        pg = ProcessGroupGloo(timeout=timedelta(seconds=20))
        manager = Manager(pg=pg, load_state_dict=load, state_dict=save, min_replica_size=2)
        model = DistributedDataParallel(manager, pg, model, QuantizationState(bits=4), quantization_hook)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters()))
    """

    def __init__(
        self,
        manager: torchft.Manager,
        pg: torchft.ProcessGroupGloo,
        module: nn.Module,
        state: Any,
        hook: Callable[..., torch.futures.Future[torch.Tensor]],
        **kwargs: Any,
    ):
        _require_gloo("DistributedDataParallel", pg)
        super().__init__(manager, module, **kwargs)
        self._manager, self._pg, self._hooked = manager, pg, Hooked(hook, state)
        self._group: dist.ProcessGroup | None = None  # of the last averaged bucket
        # The Manager's step and the state's when the last backward began, and whether it has failed.
        self._step, self._iter, self._has_failed = -1, 0, False
        if isinstance(state, CompressorState):
            state.number_parameters(module.named_parameters())
            state.keep_undo = True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register the constructor's hook, when torchft's constructor registers its own all-reduce."""
        super().register_comm_hook(None, self._average)

    def _average(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket with the hook. After an error, which is reported, return the bucket as it is."""
        buffer, manager = bucket.buffer(), self._manager
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        averaged.set_result(buffer)

        def value(average: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            try:
                return average.value()
            except Exception as error:
                self._report(error)
                return buffer

        manager.wait_quorum()
        if not manager.errored():
            try:
                self._prepare(buffer)
                hook, state = self._hooked
                averaged = hook(state, bucket).then(value)
            except Exception as error:
                self._report(error)
        if manager.errored() or bucket.is_last():
            # At the end of backward, where these averages would end, backward would raise their errors.
            end_backward(drops=bool(manager.errored()))
        return averaged

    def _prepare(self, buffer: torch.Tensor) -> None:
        """Meet the quorum's group, if it is new, and scale a bucket by the replicas that count."""
        manager = self._manager
        group = group_of_quorum(manager, self._pg)
        if group is not self._group:
            self._meet(group, buffer)
        if self._step != manager.current_step():
            self._step, self._iter = manager.current_step(), self._hooked.step or 0
        # Replicas that heal give zeros, and don't count. Errors, of earlier steps, count as ever.
        if not manager.is_participating():
            buffer.zero_()
        elif (scale := group.size() / manager.num_participants()) != 1:
            buffer *= scale

    def _meet(self, group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
        """Begin to average with a quorum's group."""
        # After a step that isn't committed, every quorum has a new group. A step may have been taken back.
        is_refused = self._has_failed or self._step == self._manager.current_step()
        has_begun, self._step, self._has_failed = self._step >= 0, -1, False
        if has_begun and is_refused:
            self._hooked.undo(self._iter)
        self._hooked = self._hooked.regroup(group)
        if isinstance(state := self._hooked.state, CompressorState):
            take_over(state, furthest(state.iter, group, device_for(group, [buffer]))[0], group)
        self._group = group

    def _report(self, error: Exception) -> None:
        self._has_failed = True
        if not self._manager.errored():  # what follows from an error isn't the cause
            step = self._manager.current_step()
            _logger.warning("step %s is not committed: %s", step, error, exc_info=error)
            self._manager.report_error(error)
