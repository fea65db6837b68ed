"""The process group that an argument stands for."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from ..rules import described


def require_group(whose: str, process_group: Any, argument: str = "process_group") -> None:
    """Raise TypeError for anything but a process group and None, which means the default one."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return
    if type(process_group) is int and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        cause = "this rank is not in the group that new_group made; only the group's ranks may use it"
    else:
        cause = "another argument came first"
    raise TypeError(
        f"{whose} takes a process group or None as its {argument}, got {described(process_group)}. "
        f"Likely cause: {cause}"
    )


def resolve_group(whose: str, process_group: Any, argument: str = "process_group") -> dist.ProcessGroup:
    """Return the process group given to `whose` as this argument, or the default group for None.

    Raises RuntimeError if there is no default group, TypeError for anything that isn't a process group.
    """
    require_group(whose, process_group, argument)
    group = joined_group(process_group)
    if group is None:
        raise RuntimeError(
            f"{whose} has None as its {argument}, which means the default process group, but there is none: "
            "call torch.distributed.init_process_group first"
        )
    return group


def joined_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group, or for None the default group if there is one."""
    return dist.group.WORLD if process_group is None else process_group


def device_for(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return a device whose tensors the group exchanges: with NCCL that of the first CUDA tensor among these.

    That is where the model is, which need not be the current device; the latter if there is no such tensor.
    """
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    devices = (tensor.device for tensor in tensors if ops.has_streams(tensor.device))
    return next(devices, None) or torch.device("cuda", torch.cuda.current_device())
