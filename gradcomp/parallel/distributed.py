"""The wrapper itself."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from gradcomp.hooks import default_hooks
from gradcomp.reducer import GradBucket, Reducer, broadcast_coalesced

from .arguments import check_module, group_of, named_parameters, refuse
from .containers import through_sink, to_device
from .join import DDPJoinHook, highest_rank, will_average
from .optimizers_in_backward import take_over


class DistributedDataParallel(nn.Module, Joinable):
    """Data parallelism for a module: every rank has a replica, and backward averages their gradients.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: its arguments, attributes, semantics and messages.

    module: the same on every rank; rank 0's parameters and buffers become everybody's (init_sync).
    device_ids: None, or the one GPU the module is on, to which inputs are then moved. output_device, dim,
        check_reduction: accepted, as torch's are, without effect.
    broadcast_buffers (forward_sync_buffers): rank 0's buffers become everybody's before every forward.
    process_group or device_mesh (of one dimension): the ranks; None for the default group.
    bucket_cap_mb: MiB per bucket; None for 25 and a first bucket of 1.
    find_unused_parameters, gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params: see Reducer.
    batched_grad_copy: accepted; a bucket is always filled in one launch.

    Raises as torch's does for a module without trainable parameters, on several kinds of devices, or uninitialised;
    NotImplementedError for options that this one does not take: mixed_precision (use torch.autocast or a
    compress hook), delay_all_reduce_named_params and param_to_hook_all_reduce (use a Reducer of your own for those
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
    ):
        super().__init__()
        Joinable.__init__(self)
        refuse(
            mixed_precision=(mixed_precision, "torch.autocast, or a hook that compresses to 16 bits"),
            delay_all_reduce_named_params=(
                delay_all_reduce_named_params,
                "a gradcomp.Reducer of your own for those parameters",
            ),
            param_to_hook_all_reduce=(
                param_to_hook_all_reduce,
                "a gradcomp.Reducer of your own for those parameters",
            ),
            bucket_cap_mb_list=(bucket_cap_mb_list, "bucket_cap_mb"),
        )
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self.process_group = group_of(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = dict(named_parameters(module, self.parameters_to_ignore))
        self.device_ids = check_module(list(named.values()), device_ids, output_device)
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.module, self.dim = module, dim
        self.device = next(iter(named.values())).device
        self.device_type = self.device.type
        # As torch: broadcast_buffers=False leaves buffers alone at construction, too; the newer name does not.
        sync_buffers_now = forward_sync_buffers is not None or broadcast_buffers is not False
        sync = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = sync is not False
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._comm_hooks: list[tuple[Callable[..., Any], Any]] = []
        self._make_reducer(verify=init_sync)
        if init_sync:
            self.sync_module(src=0, buffers=sync_buffers_now)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave these alone, by their names in named_parameters() and named_buffers(). Before wrapping; as torch's."""
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, params_and_buffers_to_ignore
        )

    def _make_reducer(self, verify: bool) -> None:
        sparse = [
            layer.weight
            for layer in self.module.modules()
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        ]
        caps = {} if self.bucket_cap_mb is None else dict.fromkeys(
            ("bucket_cap_mb", "first_bucket_cap_mb"), self.bucket_cap_mb
        )  # fmt: skip
        self.reducer = Reducer(
            named_parameters(self.module, self.parameters_to_ignore),
            self.process_group,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            sparse_params=sparse,
            verify=verify,
            **caps,
        )
        self.reducer.only_prepared = True
        self._has_looked_for_optimizers = False

    # --- forward ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._before_forward()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = to_device(inputs, device), to_device(kwargs, device)
        outputs = self.module(*inputs, **kwargs)
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = is_synced
        if not is_synced:
            return outputs
        if self.find_unused_parameters and not self.static_graph:
            outputs = through_sink(outputs)
        self.reducer.prepare_for_backward(outputs)
        return outputs

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self.reducer.expect_finished()
        if not self._has_looked_for_optimizers:
            self._has_looked_for_optimizers = True
            self.reducer.after_step = take_over(self.module.parameters())
        work = Join.notify_join_context(self)
        self.reducer.communicator.divisor = self.process_group.size()
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            # The host has to know: how many ranks still have input, which torch's asks in every such step, too.
            self.reducer.communicator.divisor = int(work.get_future().wait()[0].item())
        if self.will_sync_buffers():
            # Rank 0's; where ranks may run out of input, those of the last that has not.
            is_uneven = self._join_config.enable
            self.sync_buffers(highest_rank(self.process_group, self.device, True) if is_uneven else 0)
        if self._join_config.enable:
            will_average(self.process_group, self.device, self.require_backward_grad_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in here only accumulate; the next one outside is averaged with what has accumulated."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def train(self, mode: bool = True) -> "DistributedDataParallel":
        super().train(mode)
        return self

    # --- hooks ---

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average buckets with hook(state, bucket). Once. Raises as torch's does for a hook of another signature."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        signature = inspect.signature(hook)
        annotation = signature.parameters["bucket"].annotation
        if annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
            raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
            raise ValueError(
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            )
        self.reducer.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    def _set_static_graph(self) -> None:
        """As static_graph=True at construction. Before the first forward."""
        self.static_graph = True
        self.reducer.close()
        self._make_reducer(verify=False)
        for hook, state in self._comm_hooks:
            self.reducer.register_comm_hook(state, hook)

    # --- what all ranks have in common ---

    def sync_module(self, src: int, buffers: bool) -> None:
        """Parameters and buffers of one of the group's ranks for all of them."""
        states = [p.detach() for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        if buffers:
            states += [buffer.detach() for buffer in self._buffers_to_sync()]
        broadcast_coalesced(states, src, self.process_group)

    def _buffers_to_sync(self) -> list[torch.Tensor]:
        # Asked for every time: a module may have put others in their places.
        named = self.module.named_buffers()
        return [buffer for name, buffer in named if name not in self.parameters_to_ignore]

    def will_sync_buffers(self) -> bool:
        return self.require_forward_param_sync and self.broadcast_buffers and bool(self._buffers_to_sync())

    def sync_buffers(self, src: int) -> None:
        buffers = [buffer.detach() for buffer in self._buffers_to_sync()]
        # A forward before this one may still need them for its backward.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]
            broadcast_coalesced(buffers, src, self.process_group)

    # --- uneven inputs ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs: see torch's join."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- serialisation ---

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        state = copy.copy(self.__dict__)
        del state["process_group"], state["reducer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = group_of(None, None)
        hooks, self._comm_hooks = self._comm_hooks, []
        self._make_reducer(verify=False)
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)
