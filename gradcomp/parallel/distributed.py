"""The wrapper: a module whose backward averages gradients over all ranks."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from gradcomp.comm.reduced_values import ReducedValues
from gradcomp.comm.torch_private import (
    ACTIVE_DDP,
    check_wrapper,
    ignore_for_model,
    ignored_in,
    not_compiled,
    optimizers_in_backward,
)
from gradcomp.hooks import default_hooks
from gradcomp.reducer import Reducer

from .module import (
    Replicas,
    check_hook,
    check_module,
    group_of,
    highest_rank,
    named_parameters,
    refuse,
    synchronizes_buffers,
    through_sink,
    to_device,
)

_WILL_AVERAGE = "tell the other ranks whether this one averages its next backward"


class DistributedDataParallel(nn.Module, Joinable):
    """Data parallelism for a module: every rank has a replica, and backward averages their gradients.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: the same arguments, attributes, semantics and
    messages.

    module: the same on every rank; rank 0's parameters and buffers are copied to all ranks (init_sync).
    device_ids: None, or the one GPU of the module, to which inputs are then moved.
    output_device, dim, check_reduction: accepted without effect.
    forward_sync_buffers (or broadcast_buffers, its deprecated name): rank 0's buffers are copied to all ranks
        before every forward.
    process_group or device_mesh (of one dimension): the ranks; None for the default group.
    bucket_cap_mb: MiB per bucket; None for 25 and a first bucket of 1.
    find_unused_parameters, gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params: see Reducer.
    batched_grad_copy, lazy_bucket_allocation: accepted; a bucket is filled in one launch, and allocated once.

    The attribute require_manual_backward_finalization (of torch 2.15) has no effect: gradients are averaged
    when backward returns, and finalize_backward() has nothing left to do.

    With init_sync the ranks compare their models and options, and a difference is a RuntimeError on every
    rank. Without init_sync, the first step compares options and hooks.

    Raises torch's errors for a module without trainable parameters, on several types of devices, or
    uninitialized; TypeError for anything but a module, and for DTensors; NotImplementedError for
    mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce and bucket_cap_mb_list.
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
        Joinable.__init__(self)
        check_wrapper(self)
        refuse(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        sync_now, self.forward_sync_buffers = synchronizes_buffers(
            check_reduction, broadcast_buffers, forward_sync_buffers
        )
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedDataParallel takes a module, got {type(module).__name__}: pass the model itself"
            )
        self.process_group = group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh  # as in torch, which has no such attribute without a mesh
        self.parameters_to_ignore = ignored_in(module)
        named = dict(named_parameters(module, self.parameters_to_ignore))
        self.device_ids = check_module(module, named, device_ids, output_device)
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.module, self.dim = module, dim
        self.device = next(iter(named.values())).device
        self.device_type = self.device.type
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_manual_backward_finalization = False
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._make_reducer(verify=init_sync)
        if init_sync:
            self._replicas.compare(bool(self.forward_sync_buffers), sync_now)
            self._replicas.copy(0, sync_now)

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Any) -> None:
        """Name the parameters and buffers that wrappers, torch's too, must leave alone."""
        ignore_for_model(module, names)

    def _make_reducer(self, verify: bool) -> None:
        self.reducer, self._replicas = _WrappersReducer(self, verify), Replicas(self)
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(state, hook)
        self._divisor: int | None = None  # of join(), where ranks may have run out of input
        self._has_run = False

    # --- forward ---

    @partial(not_compiled, recursive=False)  # torch.compile traces only the module
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            before = getattr(TorchsDDP, ACTIVE_DDP, None)  # of a wrapper around this one
            setattr(TorchsDDP, ACTIVE_DDP, self.reducer.compilers_view)
            try:
                outputs = self.module(*inputs, **kwargs)
            finally:
                setattr(TorchsDDP, ACTIVE_DDP, before)
            return self._after_forward(outputs)

    @not_compiled
    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Synchronize what the forward needs; return its arguments, on the device."""
        self._has_run = True
        if torch.is_grad_enabled():
            self.reducer.before_forward()
        work = Join.notify_join_context(self)
        self._divisor = None
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            # The host waits, as in torch's wrapper, for the number of ranks that still have input.
            self._divisor = int(work.get_future().wait()[0].item())
        self._replicas.sync_buffers(has_input=True)
        if self._join_config.enable:
            averages = [self.require_backward_grad_sync]
            ReducedValues(_WILL_AVERAGE, averages, [self.process_group], self.device)
        if self.device_ids:
            inputs, kwargs = to_device((inputs, kwargs), torch.device(self.device_type, self.device_ids[0]))
        return inputs, kwargs

    @not_compiled
    def _after_forward(self, outputs: Any) -> Any:
        """Prepare the backward; return the outputs that it starts from."""
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
        """Only accumulate gradients of forwards inside; the next one outside averages their sum, too."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether finalize_backward() must follow a backward."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Raise RuntimeError if the last backward did not reach all parameters. Averages nothing more."""
        self.reducer.expect_finished()

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average buckets with hook(state, bucket).

        Raises torch's errors for a wrong signature or a second hook.
        """
        check_hook(state, hook)
        self.reducer.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    def _set_static_graph(self) -> None:
        """Set static_graph=True after construction. Raises RuntimeError after the first forward."""
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

    # --- uneven inputs ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs: see torch's join."""
        divides = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **divides)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _WrappersJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- serialization ---

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. "
                "That is, when you have called init_process_group and have not passed process_group argument "
                "to DDP constructor"
            )
        left_out = ("process_group", "reducer", "_replicas")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = group_of(None, None)
        self._make_reducer(verify=False)


class _WrappersReducer(Reducer):
    """The wrapper's Reducer: averages only backwards through outputs of the wrapper.

    At the end of a backward it raises RuntimeError for gradients that are neither averaged nor ignored: their
    parameters were added, replaced or unfrozen after construction. After an average it steps the optimizers
    of torch's _apply_optimizer_in_backward.
    """

    _is_wrappers = True

    def __init__(self, ddp: DistributedDataParallel, verify: bool):
        module, ignored = ddp.module, ddp.parameters_to_ignore
        caps = () if ddp.bucket_cap_mb is None else ("bucket_cap_mb", "first_bucket_cap_mb")
        layers = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        super().__init__(
            named_parameters(module, ignored),
            ddp.process_group,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            find_unused_parameters=ddp.find_unused_parameters,
            static_graph=ddp.static_graph,
            skip_all_reduce_unused_params=ddp.skip_all_reduce_unused_params,
            sparse_params=[layer.weight for layer in layers if layer.sparse],
            verify=verify,
            **dict.fromkeys(caps, ddp.bucket_cap_mb),
        )
        # A compiled graph is one node of autograd: all its gradients come when its backward ends. So
        # torch.compile cuts graphs where a bucket is full (torch._dynamo.backends.distributed.DDPOptimizer),
        # in the forward of the wrapper that TorchsDDP names. The first graph's cap is torch's for the first
        # bucket, 1 MiB, and may not be larger than the others'.
        cap_bytes = max(int(self.communicator.caps_bytes[1]), 1 << 20)
        self.compilers_view = SimpleNamespace(bucket_bytes_cap=cap_bytes)
        # Weakly: the wrapper holds this Reducer.
        self._ddp, self._ignored = weakref.ref(ddp), ignored
        # The parameters are kept alive: an id may come again.
        left_alone = [param for name, param in module.named_parameters() if name in ignored]
        self._known = {id(param): param for param in [*self._params, *left_alone]}
        self._stepping: list[torch.Tensor] = []

    def _rebuild_buckets(self) -> bool:
        """Return False, for Lightning's manual optimization, which calls this on torch's Reducer."""
        return False

    def before_forward(self) -> None:
        """Raise RuntimeError if the last backward did not reach all parameters.

        Keep optimizers from stepping in the next one, also those attached since the last call. Not later: an
        optimizer that is attached after the forward has stepped when backward tells of its parameter.
        """
        self.expect_finished()
        self._hooks.watch()
        watched = [self._params[index] for index in self._hooks.watched]
        self._stepping = [param for param in watched if optimizers_in_backward(param, detaches=True)]

    def expect_accumulation(self) -> None:
        """Say that the next backward only accumulates, unless it comes through outputs that were prepared."""
        if not self._is_opaque:
            self._is_prepared = self._stays_prepared = False

    def join_with_zeros(self) -> None:
        """Run a step of the other ranks with gradients of zero, for a rank that has no more input.

        This rank keeps its own gradients.
        """
        with self._lock:
            kept = [param.grad for param in self._params]
            own = [each for each in kept if each is not None]
            copies = [each.clone() for each in own]  # own may be in the buckets
            try:
                for param in self._params:
                    param.grad = None
                self._forget_step()
                self._begin(unused=range(len(self._params)))
                self._finish()
            finally:
                self._forget_step()
                for param, gradient in zip(self._params, kept, strict=True):
                    param.grad = gradient
                with torch.no_grad():
                    for gradient, copy in zip(own, copies, strict=True):
                        gradient.copy_(copy)

    def _after_backward(self, is_averaged: bool) -> None:
        ddp = self._ddp()
        # Without parameters' names, which take most of Module.parameters()'s time.
        modules = () if ddp is None else ddp.module.modules()
        if found := [
            id(param)
            for module in modules
            for param in module._parameters.values()
            if id(param) not in self._known
            and param is not None
            and (param.requires_grad and param.is_leaf and param.grad is not None)
        ]:
            self._sharing.require_averaged(found, named_parameters(ddp.module, self._ignored))  # type: ignore[union-attr]
        if is_averaged:
            for param in self._stepping:
                for optimizer in optimizers_in_backward(param):
                    optimizer.step()
                param.grad = None


class _WrappersJoinHook(JoinHook):
    """The collectives of a rank without input: those of the ranks that go on, with zeros."""

    def __init__(self, ddp: DistributedDataParallel):
        self.ddp = ddp

    def main_hook(self) -> None:
        ddp = self.ddp
        ddp._replicas.sync_buffers(has_input=False)
        averages = ReducedValues(_WILL_AVERAGE, [False], [ddp.process_group], ddp.device)
        ddp.require_forward_param_sync = bool(averages.wait()[0])
        if ddp.require_forward_param_sync:
            ddp.reducer.join_with_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.ddp._replicas.copy(highest_rank(self.ddp, is_last_joiner), self.ddp.forward_sync_buffers)
