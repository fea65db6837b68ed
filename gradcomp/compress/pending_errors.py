"""Errors that wait until their tensors are sent."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch


class PendingErrors:
    """The errors of tensors that a compressor sends exactly, and that another compressor sent before it.

    A tensor's error is added to the tensor's next gradient, and so sent once. While a tensor is unused, its
    error waits.

    shapes: the shapes of all tensors in the bucket.
    positions: the positions of the tensors that are sent exactly.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], positions: Iterable[int]):
        ends = list(accumulate(map(math.prod, shapes), initial=0))
        self._slices = {each: slice(ends[each], ends[each + 1]) for each in positions}
        self._errors: dict[int, torch.Tensor] = {}  # by position
        # The errors that are part of this step's average. On CUDA the side stream may read one until the step
        # ends, so it is freed in the next step.
        self._sent: dict[int, torch.Tensor] = {}

    @property
    def are_none(self) -> bool:
        """True if no error waits, and none is part of the last average."""
        return not self._errors and not self._sent

    def load(self, error: torch.Tensor) -> None:
        """Replace all errors. error: [numel], the bucket's, of which a copy is kept."""
        self._errors = {position: error[where].clone() for position, where in self._slices.items()}

    def add_to(self, flat: torch.Tensor, unused: Sequence[int]) -> None:
        """Add the errors to the gradients that are sent now.

        flat: [numel], the bucket's gradients.
        unused: the positions of the tensors that this rank's backward has not used.
        """
        self._sent = {each: self._errors.pop(each) for each in self._errors.keys() - set(unused)}
        for position, error in self._sent.items():
            flat[self._slices[position]] += error

    def write_to(self, error: torch.Tensor) -> None:
        """Write the errors to their places in the bucket's error, [numel]."""
        for position, own in self._errors.items():
            error[self._slices[position]] = own

    def take_back(self, offset: int, values: torch.Tensor) -> None:
        """Keep an unused average, which may contain an error; see Compressor.add_to_error."""
        for position in self._sent:
            if self._slices[position].start == offset:
                self._errors[position] = values.clone()
