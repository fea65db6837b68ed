"""DistributedDataParallel: torch's wrapper of that name, thin, on top of the Reducer."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradcomp.hooks import default_hooks
from gradcomp.reducer import GradBucket, Reducer, broadcast_coalesced

__all__ = ["DistributedDataParallel"]


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
        _refuse(
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
        self.process_group = _group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = dict(_named_parameters(module, self.parameters_to_ignore))
        self.device_ids = _check_module(list(named.values()), device_ids, output_device)
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
            self._sync_module(src=0, buffers=sync_buffers_now)

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
            _named_parameters(self.module, self.parameters_to_ignore),
            self.process_group,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            sparse_params=sparse,
            verify=verify,
            **caps,
        )
        self.reducer._only_prepared = True
        self._optimizers_in_backward_are_set_up = False

    # --- forward ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._before_forward()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = _to_device(inputs, device), _to_device(kwargs, device)
        outputs = self.module(*inputs, **kwargs)
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = is_synced
        if not is_synced:
            return outputs
        if self.find_unused_parameters and not self.static_graph:
            outputs = _through_sink(outputs)
        self.reducer.prepare_for_backward(outputs)
        return outputs

    def _before_forward(self) -> None:
        if not self._optimizers_in_backward_are_set_up:
            self._set_up_optimizers_in_backward()
        work = Join.notify_join_context(self)
        self.reducer._divisor = self.process_group.size()
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            # The host has to know: how many ranks still have input, which torch's asks in every such step, too.
            self.reducer._divisor = int(work.result()[0].item())
        if self._will_sync_buffers():
            self._sync_buffers(self._source_of_buffers())
        if self._join_config.enable:
            self._whether_to_sync(
                self.require_backward_grad_sync
            )  # for the ranks without input: nobody waits here

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

    def _set_up_optimizers_in_backward(self) -> None:
        """Optimizers of torch's _apply_optimizer_in_backward step when their parameters have been averaged."""
        self._optimizers_in_backward_are_set_up = True
        stepping = [param for param in self.module.parameters() if hasattr(param, "_in_backward_optimizers")]
        if not stepping:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in stepping:
            for handle in param_to_optim_hook_handle_map.get(param, ()):
                handle.remove()

        def step() -> None:
            for param in stepping:
                for optimizer in param._in_backward_optimizers:
                    optimizer.step()
                param.grad = None

        self.reducer._after_step = step

    # --- what all ranks have in common ---

    def _sync_module(self, src: int, buffers: bool) -> None:
        """Parameters and buffers of one of the group's ranks for all of them."""
        states = [p.detach() for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        if buffers:
            states += [buffer.detach() for buffer in self._buffers_to_sync()]
        broadcast_coalesced(states, src, self.process_group)

    def _buffers_to_sync(self) -> list[torch.Tensor]:
        # Asked for every time: a module may have put others in their places.
        named = self.module.named_buffers()
        return [buffer for name, buffer in named if name not in self.parameters_to_ignore]

    def _will_sync_buffers(self) -> bool:
        return self.require_forward_param_sync and self.broadcast_buffers and bool(self._buffers_to_sync())

    def _sync_buffers(self, src: int) -> None:
        buffers = [buffer.detach() for buffer in self._buffers_to_sync()]
        # A forward before this one may still need them for its backward.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]
            broadcast_coalesced(buffers, src, self.process_group)

    def _source_of_buffers(self) -> int:
        """Rank 0; where ranks may run out of input, the last that has not."""
        return self._common_rank(True) if self._join_config.enable else 0

    def _common_rank(self, is_candidate: bool) -> int:
        rank = torch.tensor([self.process_group.rank() if is_candidate else -1], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def _whether_to_sync(self, mine: bool) -> torch.Tensor:
        """More than zero if any rank averages its next backward."""
        flag = torch.full((1,), int(mine), device=self.device)
        dist.all_reduce(flag, group=self.process_group)
        return flag

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
        return _JoinHook(self)

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
        self.process_group = _group(None, None)
        hooks, self._comm_hooks = self._comm_hooks, []
        self._make_reducer(verify=False)
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)


class _JoinHook(JoinHook):
    """What a rank without input does while others go on: the same collectives, with zeros."""

    def __init__(self, ddp: DistributedDataParallel):
        self.ddp = ddp

    def main_hook(self) -> None:
        ddp = self.ddp
        if ddp._will_sync_buffers():
            ddp._sync_buffers(ddp._common_rank(False))
        ddp.require_forward_param_sync = bool(ddp._whether_to_sync(False).item())
        if ddp.require_forward_param_sync:
            ddp.reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.ddp._sync_module(self.ddp._common_rank(is_last_joiner), self.ddp.broadcast_buffers)


class _Sink(torch.autograd.Function):
    """The identity. Outputs that the loss leaves out pass an undefined gradient on, and their parameters count as
    ready, without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def _through_sink(outputs: Any) -> Any:
    leaves, structure = tree_flatten(outputs)
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    if not places:
        return outputs
    passed = _Sink.apply(*(leaves[i] for i in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


def _named_parameters(module: nn.Module, ignored: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


def _refuse(**options: tuple[Any, str]) -> None:
    for name, (value, alternative) in options.items():
        if value is not None:
            raise NotImplementedError(f"gradcomp's DistributedDataParallel has no {name}: use {alternative}")


def _group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if process_group is None:
        process_group = dist.group.WORLD
    if process_group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return process_group


def _check_module(
    params: list[torch.Tensor], device_ids: list[Any] | None, output_device: Any
) -> list[int] | None:
    """The device index of inputs, or None. Raises as torch's constructor does."""
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in params}
    kinds = {device.type for device in devices}
    if len(kinds) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )
    if not device_ids or "cpu" in kinds or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None
    device = (
        torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    )
    return [device.index or 0]


def _to_device(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dicts on the device; containers keep their types."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        moved = {key: _to_device(item, device) for key, item in value.items()}
        return moved if isinstance(value, dict) and type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    return value
