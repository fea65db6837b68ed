"""A Hadamard transform before quantization: it spreads a block's large elements over the whole block.

docs/accuracy.md says what that gains, and why the library has no such option.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook


class Hadamard:
    """An orthogonal transform of every `width` elements: random signs, then a Hadamard matrix.

    It is linear, so the mean of transformed gradients is the transformed mean, and error feedback works on
    what is transformed.

    width: a power of two. Elements that are left at the end of a bucket stay as they are.
    """

    def __init__(self, width: int) -> None:
        matrix = torch.ones(1, 1)
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        self.matrix = matrix / math.sqrt(width)  # symmetric: its own inverse
        self._signs: dict[int, torch.Tensor] = {}

    def apply_(self, flat: torch.Tensor) -> torch.Tensor:
        """Transform a bucket in place. flat: [numel], fp32."""
        blocks, signs = self._blocks(flat)
        blocks.copy_((blocks * signs) @ self.matrix)
        return flat

    def undo_(self, flat: torch.Tensor) -> torch.Tensor:
        """Undo the transform in place."""
        blocks, signs = self._blocks(flat)
        blocks.copy_((blocks @ self.matrix) * signs)
        return flat

    def _blocks(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks, [n, width], and their signs: equal in every step and on every rank."""
        width = len(self.matrix)
        blocks = flat[: len(flat) // width * width].view(-1, width)
        if len(flat) not in self._signs:
            random = torch.Generator().manual_seed(len(flat))
            self._signs[len(flat)] = torch.randint(2, blocks.shape, generator=random) * 2.0 - 1.0
        return blocks, self._signs[len(flat)]


def register_hadamard(model: Any, width: int, start_iter: int) -> None:
    """Register quantization_hook with 4 bits on transformed gradients."""
    state, transform = QuantizationState(bits=4, start_iter=start_iter), Hadamard(width)

    def hook(state: QuantizationState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        transform.apply_(bucket.buffer())
        return quantization_hook(state, bucket).then(lambda done: transform.undo_(done.value()))

    model.register_comm_hook(state, hook)
