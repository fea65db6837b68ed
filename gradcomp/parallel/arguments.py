"""What the constructor is given: options that are refused, the ranks, the module and where it lies."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.reducer.parameters import require_plain


def named_parameters(module: nn.Module, ignored: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


def refuse(**options: tuple[Any, str]) -> None:
    """Raise NotImplementedError for an option that is given: name=(value, what to use instead)."""
    for name, (value, alternative) in options.items():
        if value is not None:
            raise NotImplementedError(f"gradcomp's DistributedDataParallel has no {name}: use {alternative}")


def warn_of_deprecated(
    check_reduction: bool, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> None:
    """Warn as torch's constructor does, where that is called."""
    messages = []
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        messages.append(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided."
        )
    elif broadcast_buffers is not None:
        messages.append(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init. If you rely on buffers "
            "NOT being synced at init (e.g. rank-local buffers), keep using `broadcast_buffers=False` until "
            "`init_sync_buffers` is available."
        )
    if check_reduction:
        messages.append(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it."
        )
    for message in messages:
        warnings.warn(message, FutureWarning, stacklevel=3)


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The ranks: one of these, or the default group. Raises as torch's constructor does."""
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


def check_module(
    named: Mapping[str, torch.Tensor], device_ids: list[Any] | None, output_device: Any
) -> list[int] | None:
    """The device index of inputs, or None. Raises as torch's constructor does, and TypeError for DTensors."""
    params = list(named.values())
    for name, param in named.items():
        require_plain(name, param)
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
    kinds = {param.device.type for param in params}
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
