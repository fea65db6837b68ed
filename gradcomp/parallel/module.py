"""What the wrapper is given: arguments, the module, equal on all ranks, inputs and outputs."""

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.comm.bucket import GradBucket, require_hook
from gradcomp.comm.consistency import first_of, require_all_ranks, require_same_on_all_ranks
from gradcomp.comm.process_group import resolve_group
from gradcomp.comm.reduced_values import ReducedValues
from gradcomp.comm.torch_private import preserve_version_counter, tree_flatten, tree_unflatten
from gradcomp.reducer import RepeatedBroadcast, broadcast_coalesced
from gradcomp.reducer.parameters import require_plain

_OWN_REDUCER = "a gradcomp.Reducer of your own for those parameters"
_INSTEAD = {
    "mixed_precision": "torch.autocast, or a hook that compresses to 16 bits",
    "delay_all_reduce_named_params": _OWN_REDUCER,
    "param_to_hook_all_reduce": _OWN_REDUCER,
    "bucket_cap_mb_list": "bucket_cap_mb",
}


def refuse(**options: Any) -> None:
    """Raise NotImplementedError if one of torch's options that this wrapper does not take is given."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"gradcomp's DistributedDataParallel has no {name}: use {_INSTEAD[name]}"
            )


def synchronizes_buffers(
    check_reduction: bool, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether buffers are synchronized at construction, and before every forward.

    As in torch, broadcast_buffers=False turns both off, forward_sync_buffers=False the second alone. Warns of
    deprecated arguments as torch's constructor does, at the line that calls the wrapper's.
    """
    messages = []
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        messages.append(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is "
            "deprecated and its value is ignored when `forward_sync_buffers` is provided."
        )
    elif broadcast_buffers is not None:
        messages.append(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init. If you "
            "rely on buffers NOT being synced at init (e.g. rank-local buffers), keep using "
            "`broadcast_buffers=False` until `init_sync_buffers` is available."
        )
    if check_reduction:
        messages.append(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid "
            "using it."
        )
    for message in messages:
        warnings.warn(message, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    syncs = broadcast_buffers is None or broadcast_buffers
    return syncs, syncs


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the given group, the mesh's, or the default one. Raises the errors of torch's constructor."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if process_group is None:
        dist.get_backend()  # raises torch's ValueError if there is no default group
    return resolve_group("DistributedDataParallel", process_group)


def check_module(
    module: nn.Module, named: Mapping[str, torch.Tensor], device_ids: list[Any] | None, output_device: Any
) -> list[int] | None:
    """Return the index of the device to move inputs to, in a list; None if they stay where they are.

    Raises torch's errors for an unusable module, and TypeError for DTensors as buffers.
    """
    params = list(named.values())
    for name, buffer in module.named_buffers():
        require_plain(name, buffer, "buffer")
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            "gradient."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in params}
    device_types = {param.device.type for param in params}
    if len(device_types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {device_types}."
        )
    if not device_ids or "cpu" in device_types or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None
    (device,) = device_ids
    return [device if isinstance(device, int) else torch.device(device).index or 0]


def check_hook(state: Any, hook: Callable[..., Any]) -> None:
    """Raise TypeError or ValueError, as torch's register_comm_hook does, for a hook it can't call."""
    require_hook(hook, state)
    signature = inspect.signature(hook)
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def named_parameters(module: nn.Module, ignored: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and parameters, without the ignored ones."""
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


class Replicas:
    """Keeps the replicas of a wrapper's module equal, apart from the ignored parameters and buffers."""

    def __init__(self, ddp: Any):
        self._ddp: Any = weakref.proxy(ddp)  # the wrapper holds this
        self._group, self._device = ddp.process_group, ddp.device
        self._broadcast = RepeatedBroadcast()
        self._compared: list[str] = []  # the buffers, when the ranks compared them last

    def compare(self, in_forward: bool, buffers: bool) -> None:
        """Raise RuntimeError on every rank unless all have the same buffers and options.

        in_forward, buffers: whether buffers are synchronized before every forward, and at construction.
        """
        self._compared = self._described() if in_forward or buffers else []
        values: dict[str, Any] = {
            "forward_sync_buffers (broadcast_buffers)": in_forward,
            "synchronizing buffers at construction": buffers,
            "buffers": self._compared,
        }
        advice = "Build the same model on every rank, and wrap it with the same options"
        whose = "what DistributedDataParallel was given"
        require_same_on_all_ranks(whose, values, self._group, self._device, advice)

    def copy(self, src: int, buffers: bool) -> None:
        """Copy the parameters, with `buffers` also the buffers, of the group's rank src to all its ranks."""
        module, ignored = self._ddp.module, self._ddp.parameters_to_ignore
        states = [param for _, param in named_parameters(module, ignored)]
        broadcast_coalesced(states + self._buffers() if buffers else states, src, self._group)

    def sync_buffers(self, has_input: bool) -> None:
        """Copy buffers to all ranks before a forward: rank 0's; in join(), the highest rank's with input."""
        ddp = self._ddp
        if not (ddp.require_forward_param_sync and ddp.forward_sync_buffers):
            return
        buffers = self._buffers()
        if buffers or self._broadcast.kept:
            source = highest_rank(ddp, has_input) if ddp._join_config.enable else 0
            # A forward before this one may still need them for its backward.
            counted = tuple([buffer for buffer in buffers if not buffer.is_inference()])
            with preserve_version_counter(counted):
                self._broadcast(buffers, source, self._group, self._compare_again)

    def _buffers(self) -> list[torch.Tensor]:
        """Return the buffers to synchronize, found again every time: a module may replace buffers."""
        module, ignored = self._ddp.module, self._ddp.parameters_to_ignore
        if ignored:
            return [buffer for name, buffer in module.named_buffers() if name not in ignored]
        # Without their names, which take most of Module.buffers()'s time.
        unique = {id(buffer): buffer for each in module.modules() for buffer in each._buffers.values()}
        return [buffer for buffer in unique.values() if buffer is not None]

    def _described(self) -> list[str]:
        named, ignored = self._ddp.module.named_buffers(), self._ddp.parameters_to_ignore
        return [f"{name} {list(each.shape)} {each.dtype}" for name, each in named if name not in ignored]

    def _compare_again(self) -> None:
        """Raise RuntimeError unless the buffers have changed on every rank, and are alike.

        Called before the first copy, and where this rank's buffers have changed. Other ranks may be in
        another collective: this rank waits in the store, and leaves a note there for their errors.
        """
        advice = (
            "Register, replace and remove buffers on all ranks in the same step, or let each rank have its "
            "own (forward_sync_buffers=False, or _set_params_and_buffers_to_ignore_for_model)"
        )
        now = self._described()
        changed = first_of(sorted(set(now).symmetric_difference(self._compared)))
        call = "a forward whose module has other buffers than in the last one"
        cause = f"Buffers that have changed: {changed or 'none'}. {advice}"
        require_all_ranks(call, "copy a module's buffers to all ranks", self._group, cause)
        whose = "what DistributedDataParallel has"
        require_same_on_all_ranks(whose, {"buffers": now}, self._group, self._device, advice)
        self._compared = now


def highest_rank(ddp: Any, is_candidate: bool) -> int:
    """Return the highest rank that is a candidate, on every rank. The host waits."""
    rank = ddp.process_group.rank() if is_candidate else -1
    return int(ReducedValues("find a rank that has input", [rank], [ddp.process_group], ddp.device).wait()[0])


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors, in tuples, lists and dicts too, on the device."""
    if isinstance(value, torch.Tensor | nn.utils.rnn.PackedSequence):
        return value.to(device, non_blocking=True)  # type: ignore[arg-type]  # the stubs want a dtype
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        return type(value)({key: to_device(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    return value


class _Sink(torch.autograd.Function):
    """Copies tensors, so that users may change them in place.

    The gradient of an output that the loss leaves out is undefined. Its parameters become ready with it.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def through_sink(outputs: Any) -> Any:
    """Return copies of the outputs: a backward from any one reaches the parameters of all."""
    leaves, structure = tree_flatten(outputs)
    positions = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    if not positions:
        return outputs
    passed = _Sink.apply(*(leaves[i] for i in positions))  # type: ignore[no-untyped-call]
    for position, tensor in zip(positions, passed, strict=True):
        leaves[position] = tensor
    return tree_unflatten(leaves, structure)
