"""Buckets as communication hooks see them: torch's, and gradcomp's for the Reducer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .rules import described

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


_PYTHON_REDUCER = (
    ". Likely cause: torch._dynamo.config.optimize_ddp is 'python_reducer', under which torch's DDP gives "
    "hooks a gradient and its parameter. allreduce_hook, fp16_compress_hook and bf16_compress_hook average "
    "these in a backward that compiled autograd compiles. For any other hook set "
    "torch._dynamo.config.optimize_ddp = True before the model is wrapped, and "
    "torch._dynamo.config.compiled_autograd = False"
)


def as_real(buffer: torch.Tensor) -> torch.Tensor:
    """View a flat complex buffer as twice as many real elements; return any other buffer as it is."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's gradient in hooks: a complex one has a last dimension of 2."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


class GradBucket:
    """A bucket as communication hooks see it, with the methods of ``torch.distributed.GradBucket``.

    buffer: the gradients one after another, 1-D, undivided. The hook's result, of as many elements, takes its
    place. Hooks see complex gradients as real ones, with a last dimension of 2.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        is_last: bool,
    ):
        self._index, self._buffer = index, as_real(buffer)
        self._parameters, self._is_last = parameters, is_last

    def index(self) -> int:
        """Return its index in the order in which buckets are averaged, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the flat buffer."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor of as many elements in the buffer's place (of another dtype, say)."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the current buffer in the parameters' shapes."""
        shapes = list(map(real_shape, self._parameters))
        parts = self._buffer.split(list(map(math.prod, shapes)))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are in the bucket, in its order."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the step's last bucket."""
        return self._is_last


def require_bucket(hook_name: str, bucket: Any) -> None:
    """Raise TypeError for anything but torch's GradBucket and gradcomp's.

    Under torch.load's safe default a file may call hooks with arguments of its choice. It can make neither
    bucket, so it can't start a collective.
    """
    if not isinstance(bucket, dist.GradBucket | GradBucket):
        raise TypeError(
            f"{hook_name} takes a torch.distributed.GradBucket or a gradcomp.reducer.GradBucket, got "
            f"{described(bucket)}{_PYTHON_REDUCER if isinstance(bucket, tuple) else ''}"
        )
