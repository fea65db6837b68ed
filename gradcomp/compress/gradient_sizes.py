"""How large gradients are in the first compressed steps: a unit that changes from step to step shows."""

import math
from typing import Any

import torch

from gradcomp.device import has_streams, pinned

from .settings import logger_of

NUM_STEPS = 40
NUM_PARTS, PART_NUMEL = 8, 512  # of a bucket, as far as it is that large
# A loss spike jumps twice, a GradScaler's scale by a factor of 2.
JUMP, MANY_JUMPS = 8, 6
WARNING = (
    f"%s: gradients became {JUMP} or more times larger or smaller from one step to the next %d times in "
    f"{NUM_STEPS} steps, but errors keep the unit of the gradients that left them. Likely cause: averages "
    "are divided by each step's tokens or samples. Multiply the loss instead, by "
    "gradcomp.loss_factor(count), or call state.rescale_errors before every backward; see "
    "docs/weighted_averages.md."
)


class GradientSizes:
    """The norms of some parts of every step's first bucket.

    norms: [NUM_STEPS, NUM_PARTS] in fp32, divided by the step's scale; None before the first step.
    keys: of the bucket; a state may have several models.
    num_steps, last_step: the number of steps noted, and the last one's own number.
    scale: the product of all factors of rescale_errors, so far.
    """

    def __init__(self) -> None:
        self.norms: torch.Tensor | None = None
        self.keys: list[str] = []
        self.num_steps, self.last_step, self.scale = 0, -1, 1.0
        self._copied: torch.cuda.Event | None = None

    def are_judged(self, state: Any, keys: list[str], buffer: torch.Tensor) -> bool:
        """Note a step's first bucket. After NUM_STEPS, warn for a state if its gradients' unit has changed.

        Returns False while that isn't known: call this in the next step, too.
        """
        if self.norms is None:
            self.keys = keys
            self.norms = torch.zeros(NUM_STEPS, NUM_PARTS, dtype=torch.float32, device=buffer.device)
        if self.keys != keys:
            return False
        if self.num_steps < NUM_STEPS:
            stride, wide = buffer.numel() // NUM_PARTS, torch.promote_types(buffer.dtype, torch.float32)
            parts = buffer.as_strided((NUM_PARTS, min(stride, PART_NUMEL)), (stride, 1))
            norms = torch.linalg.vector_norm(parts, dim=1, dtype=wide)
            self.norms[self.num_steps] = norms / self.scale
            self.num_steps, self.last_step = self.num_steps + 1, state.iter
            return False
        num_jumps = self.num_jumps()
        if num_jumps is not None and num_jumps >= MANY_JUMPS and state._states.have_errors:
            logger_of(state).warning(WARNING, state.algorithm, num_jumps)
        return num_jumps is not None

    def num_jumps(self) -> int | None:
        """Return how often most parts jumped, all in one direction; None while CUDA copies the norms."""
        assert self.norms is not None
        if has_streams(device := self.norms.device):
            host = pinned(torch.empty(self.norms.shape, dtype=torch.float32, device="cpu"), device)
            self.norms = host.copy_(self.norms, non_blocking=True)
            self._copied = torch.cuda.current_stream(device).record_event()
        if self._copied is not None and not self._copied.query():
            return None
        logs = self.norms.log2().diff(dim=0)
        is_known = logs.isfinite()  # not of zeros, inf and NaN
        limit = math.log2(JUMP)
        in_one_direction = (~is_known | (logs >= limit)).all(1) | (~is_known | (logs <= -limit)).all(1)
        return int((in_one_direction & (is_known.sum(1) > NUM_PARTS // 2)).sum())
