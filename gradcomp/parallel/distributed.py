"""The wrapper: a module whose backward averages gradients over all ranks."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from gradcomp.hooks import default_hooks
from gradcomp.reducer import Reducer, RepeatedBroadcast, broadcast_coalesced
from gradcomp.reducer.autograd import not_compiled

from .arguments import check_hook, check_module, group_of, refuse, synchronizes_buffers, warn_of_deprecated
from .compiled import graphs_end_with_buckets
from .end_of_backward import EndOfBackward
from .join import UnevenInputs, highest_rank, will_average
from .module import (
    buffers_of,
    named_parameters,
    require_same_buffers,
    sparse_weights,
    through_sink,
    to_device,
)


class DistributedDataParallel(nn.Module, UnevenInputs):
    """Data parallelism for a module: every rank has a replica, and backward averages their gradients.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: its arguments, attributes, semantics and
    messages.

    module: the same on every rank; rank 0's parameters and buffers are copied to all ranks (init_sync).
    device_ids: None, or the one GPU the module is on, to which inputs are then moved. output_device, dim,
        check_reduction: accepted, as torch's are, without effect.
    forward_sync_buffers (or broadcast_buffers, its deprecated name): rank 0's buffers are copied to all ranks
        before every forward.
    process_group or device_mesh (of one dimension): the ranks; None for the default group.
    bucket_cap_mb: MiB per bucket; None for 25 and a first bucket of 1.
    find_unused_parameters, gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params: see Reducer.
    batched_grad_copy, lazy_bucket_allocation: accepted; a bucket is filled in one launch, and allocated once.

    The attribute require_manual_backward_finalization (of torch 2.15) may be set: gradients are averaged when
    backward returns all the same, and finalize_backward() finds nothing left to do.

    With init_sync the ranks compare their models and options, and a difference is a RuntimeError on every
    rank. Without, options and hooks are compared in the first step.

    Raises as torch's does for a module without trainable parameters, on several types of devices, or
    uninitialized; TypeError for what is no module, and for DTensors; NotImplementedError for options that
    this one does not take: mixed_precision (use torch.autocast or a compress hook),
    delay_all_reduce_named_params and param_to_hook_all_reduce (use a Reducer of your own for those
    parameters), bucket_cap_mb_list (use bucket_cap_mb).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ):
        super().__init__()
        UnevenInputs.__init__(self)
        refuse(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        warn_of_deprecated(check_reduction, broadcast_buffers, forward_sync_buffers)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedDataParallel takes a module, got {type(module).__name__}: pass the model itself"
            )
        self.process_group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh  # as torch's, which has no such attribute otherwise
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = dict(named_parameters(module, self.parameters_to_ignore))
        self.device_ids = check_module(module, named, device_ids, output_device)
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.module, self.dim = module, dim
        self.device = next(iter(named.values())).device
        self.device_type = self.device.type
        sync_now, self.forward_sync_buffers = synchronizes_buffers(broadcast_buffers, forward_sync_buffers)
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_manual_backward_finalization = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._make_reducer(verify=init_sync)
        if init_sync:
            self._synchronize(sync_now)

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Name the parameters and buffers that wrapping the module has to leave alone."""
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, params_and_buffers_to_ignore
        )

    def _make_reducer(self, verify: bool) -> None:
        ignored = self.parameters_to_ignore
        named = list(named_parameters(self.module, ignored))
        averaged = [param for _, param in named if param.requires_grad]
        self._end_of_backward = EndOfBackward(self, averaged, ignored)
        caps = {} if self.bucket_cap_mb is None else dict.fromkeys(
            ("bucket_cap_mb", "first_bucket_cap_mb"), self.bucket_cap_mb
        )  # fmt: skip
        self.reducer = Reducer(
            named,
            self.process_group,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            sparse_params=sparse_weights(self.module),
            verify=verify,
            only_prepared=True,
            at_end=self._end_of_backward,
            **caps,
        )
        self._broadcast_buffers = RepeatedBroadcast()
        self._divisor: int | None = None  # of join(), where ranks may have run out of input
        self._has_run = False

    def _synchronize(self, buffers: bool) -> None:
        """Compare the ranks' buffers and options, and make rank 0's parameters and buffers everyone's."""
        require_same_buffers(
            self.module,
            self.parameters_to_ignore,
            self.process_group,
            self.device,
            in_forward=bool(self.forward_sync_buffers),
            at_construction=buffers,
        )
        self.sync_module(src=0, buffers=buffers)

    # --- forward ---

    @partial(not_compiled, recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            self._before_forward()
            if self.device_ids:
                device = torch.device(self.device_type, self.device_ids[0])
                inputs, kwargs = to_device(inputs, device), to_device(kwargs, device)
            with graphs_end_with_buckets(self.reducer.communicator.caps_bytes[1]):
                outputs = self.module(*inputs, **kwargs)
            return self._after_forward(outputs)

    def _before_forward(self) -> None:
        self._has_run = True
        if torch.is_grad_enabled():
            self.reducer.expect_finished()
            self._end_of_backward.take_over_optimizers()
        work = Join.notify_join_context(self)
        self._divisor = None
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            # The host waits, as in torch's wrapper: it has to know how many ranks still have input.
            self._divisor = int(work.get_future().wait()[0].item())
        if buffers := self.buffers_before_forward():
            # Rank 0's buffers; where ranks may run out of input, those of the highest rank that has not.
            is_uneven = self._join_config.enable
            src = highest_rank(self.process_group, self.device, True) if is_uneven else 0
            self.sync_buffers(buffers, src)
        if self._join_config.enable:
            will_average(self.process_group, self.device, self.require_backward_grad_sync)

    def _after_forward(self, outputs: Any) -> Any:
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = is_synced
        if is_synced:
            if self.find_unused_parameters and not self.static_graph:
                outputs = through_sink(outputs)
            self.reducer.prepare_for_backward(outputs, self._divisor)
        elif torch.is_grad_enabled():
            self.reducer.expect_accumulation()
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients of forwards inside; the next one outside averages what has
        accumulated."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether finalize_backward() has to come after the end of backward."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Raise RuntimeError if the last backward did not reach all parameters; averaged they are already."""
        self.reducer.expect_finished()

    # --- hooks ---

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average buckets with hook(state, bucket). Raises as torch's does for a wrong signature or a second
        hook."""
        check_hook(state, hook)
        self.reducer.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    def _set_static_graph(self) -> None:
        """Do what static_graph=True does at construction. Raises RuntimeError after the first forward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._has_run:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after "
                "DistributedDataParallel is constructed."
            )
        self.static_graph = True
        self.reducer.close()
        self._make_reducer(verify=False)
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(state, hook)

    # --- what all ranks have in common ---

    def sync_module(self, src: int, buffers: bool) -> None:
        """Copy the parameters, and the buffers if asked to, of the group's rank src to all of its ranks."""
        states = [param for _, param in named_parameters(self.module, self.parameters_to_ignore)]
        if buffers:
            states += buffers_of(self.module, self.parameters_to_ignore)
        broadcast_coalesced(states, src, self.process_group)

    def buffers_before_forward(self) -> list[torch.Tensor]:
        """Return the buffers that the next forward synchronizes."""
        is_synced = self.require_forward_param_sync and self.forward_sync_buffers
        return buffers_of(self.module, self.parameters_to_ignore) if is_synced else []

    def sync_buffers(self, buffers: list[torch.Tensor], src: int) -> None:
        """Copy the buffers of the group's rank src to all of its ranks."""
        # A forward before this one may still need them for its backward.
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]
            self._broadcast_buffers(buffers, src, self.process_group)

    # --- serialization ---

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. "
                "That is, when you have called init_process_group and have not passed process_group argument "
                "to DDP constructor"
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "_end_of_backward", "_broadcast_buffers"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("forward_sync_buffers", self.__dict__.pop("broadcast_buffers", True))
        self.process_group = group_of(None, None)
        hooks, self._comm_hooks = self._comm_hooks, []
        self._make_reducer(verify=False)
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)
