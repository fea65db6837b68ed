"""What the wrapper is given: arguments, the module with its parameters and buffers, inputs and outputs."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.comm.bucket import GradBucket
from gradcomp.comm.consistency import first_of, require_all_ranks, require_same_on_all_ranks
from gradcomp.comm.process_group import require_group
from gradcomp.comm.torch_private import tree_flatten, tree_unflatten
from gradcomp.reducer.bucket import require_callable
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
    require_group("DistributedDataParallel", process_group)
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


def check_module(
    module: nn.Module, named: Mapping[str, torch.Tensor], device_ids: list[Any] | None, output_device: Any
) -> list[int] | None:
    """Return the index of the device to move inputs to, in a list; None if they stay where they are.

    named: the parameters by name.

    Raises torch's errors for an unusable module, and TypeError for DTensors.
    """
    params = list(named.values())
    for name, param in named.items():
        require_plain(name, param)
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
    require_callable(state, hook)
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


def described_buffers(module: nn.Module, ignored: set[str]) -> list[str]:
    named = module.named_buffers()
    return [f"{name} {list(each.shape)} {each.dtype}" for name, each in named if name not in ignored]


def require_same_buffers(
    now: list[str], before: list[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise RuntimeError unless the buffers have changed on every rank, and are alike.

    Called before the first copy, and where this rank's buffers have changed. Other ranks may be in another
    collective: this rank waits in the store, and leaves a note there for their errors.
    """
    advice = (
        "Register, replace and remove buffers on all ranks in the same step, or let each rank have its own "
        "(forward_sync_buffers=False, or _set_params_and_buffers_to_ignore_for_model)"
    )
    changed = first_of(sorted(set(now).symmetric_difference(before)))
    call = "a forward whose module has other buffers than in the last one"
    cause = f"Buffers that have changed: {changed or 'none'}. {advice}"
    require_all_ranks(call, "copy a module's buffers to all ranks", group, cause)
    require_same_on_all_ranks("what DistributedDataParallel has", {"buffers": now}, group, device, advice)


def logging_data(ddp: Any) -> dict[str, Any]:
    """Return values of the construction and the buckets under torch's names, without times."""
    communicator = ddp.reducer.communicator
    params = communicator.params
    options = "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"
    return {
        "module_name": type(ddp.module).__name__,
        "backend_name": dist.get_backend(ddp.process_group),
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "dtypes": ", ".join({str(param.dtype).removeprefix("torch."): None for param in params}),
        "bucket_sizes": ", ".join(str(bucket.buffer.nbytes) for bucket in communicator.buckets),
        "comm_hook": "" if communicator.hooked.hook is None else communicator.hooked.name,
        "rank": ddp.process_group.rank(),
        "world_size": ddp.process_group.size(),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.nbytes for param in params),
        "bucket_cap_bytes": int(communicator.caps_bytes[1]),
        **{name: int(getattr(ddp, name)) for name in options},
    }


def sparse_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that have sparse gradients."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return [layer.weight for layer in layers if layer.sparse]


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors, in tuples, lists and dicts too, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
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
