"""Average a list of tensors once, through any hook, outside of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.hooks import default_hooks
from gradcomp.hooks.grad_bucket import GradBucket, as_real
from gradcomp.layout import FlatLayout

from .exchange import group_or_default, result_of


@torch.no_grad()
def average_(
    tensors: Sequence[torch.Tensor],
    hook: Callable[..., torch.futures.Future[torch.Tensor]] | None = None,
    state: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Sequence[torch.Tensor]:
    """tensors = their mean over the ranks, in place, as hook(state, bucket) averages gradients. Returns them.

    tensors: the same shapes and dtypes in the same order on every rank (pseudo-gradients, say); those of a dtype
    and device form one bucket. hook: None for an all-reduce. process_group: of that all-reduce; a hook has its own
    in its state. A state keeps its memory from call to call as long as the shapes stay.

    Raises TypeError for what isn't a floating-point or complex tensor; RuntimeError for a hook that returns no
    Future, or one with another number of elements.

    Example::

        gradcomp.average_([old - new for old, new in zip(before, after)], powerSGD_hook.powerSGD_hook, state)
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"average_ takes floating-point or complex tensors, got {found}")
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    if hook is None:
        hook, state = (
            cast("Callable[..., Any]", default_hooks.allreduce_hook),
            group_or_default(process_group),
        )
    elif process_group is not None:
        raise ValueError("average_ takes the process group of a hook in its state, not as process_group")
    for index, members in enumerate(kinds.values()):
        layout = FlatLayout((member.numel(),) for member in members)
        buffer = torch.empty(layout.numel, dtype=members[0].dtype, device=members[0].device)
        ops.gather(members, layout, out=_parts(buffer, members))
        bucket = GradBucket(index, buffer, members, is_last=index == len(kinds) - 1)
        result = result_of(hook(state, bucket), hook, as_real(buffer))
        if buffer.is_complex():
            as_real(buffer).copy_(result)
            result = buffer
        ops.scatter(_parts(result, members), layout, out=members)
    return tensors


def _parts(buffer: torch.Tensor, members: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = buffer.split([member.numel() for member in members])
    return [part.view(member.shape) for part, member in zip(parts, members, strict=True)]
