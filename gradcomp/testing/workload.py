"""Workloads: recipes of the gradients of all ranks in a run. Their repr can be read and pasted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
Poison = tuple[int, int, int, float]
Spectrum = Literal["flat", "low_rank", "power_law", "clustered", "ties", "zero"]


@dataclass(frozen=True, repr=False)
class Workload:
    """The gradients of `world_size` ranks over `steps` steps: a common signal plus every rank's noise.

    shapes: the tensors' shapes.
    buckets: the indices of each bucket's tensors, in the order in which buckets are averaged; () for one
        bucket with all tensors.
    rearranged: as in DDP, the first step has one bucket with all tensors; later steps have `buckets`.
    spectra: the singular values of each tensor's signal, a matrix of its first dimension against the others.
        The last entry holds for all further tensors.

        flat        all the same                    power_law   1, 1/2, 1/3, ...
        low_rank    `rank` equal ones, then 0       clustered   one in four 1, the others 1/100
        zero        no gradient at all
        ties        not a matrix's: elements are ±1 or ±1/8; with noise, each rank has another number of ±1

    log2_scale: the rms of each tensor's signal is 2 to this power. The last entry holds for all further
        tensors; () for 0.
    sparsity: the fraction of rows (in a vector: of elements) that are 0, the same rows on every rank.
    noise: the rms of a rank's noise over the signal's rms; in a low-rank matrix in the span of the signal's
        columns and rows, so the mean has the signal's rank.
    drift: the distance of a step's gradient from the first step's, from 0 (equal) to 1 (entirely new).
    seed: of the random numbers.

    These options change the drawn gradients:

    order: rank i gets the gradients drawn for rank order[i]; () for no change.
    log2_factor: all gradients are multiplied by 2 to this power.
    zero_steps: the number of steps with zero gradients at the end.
    period: the gradients of the first `period` steps repeat; 0 for no repetition.
    accumulated: a gradient comes in two backward passes, half in each, as under DDP's no_sync.
    groups: the number of disjoint process groups of `world_size` ranks. The first one is measured. The others
        have the negative gradients.
    masked: the fraction of a tensor's elements that are 0 on every rank in every step, like the gradients of
        pruned weights; and half that fraction of a matrix's rows, and of its columns.
    poison: (step, rank, index, value): the last element of tensor `index` is `value`, for example inf.
    device: the device of the hook's buckets; all other tensors are on the CPU.

    A gradient depends on the recipe only. It is drawn in float64, multiplied, and rounded to dtype.
    """

    shapes: tuple[Shape, ...]
    buckets: tuple[tuple[int, ...], ...] = ()
    world_size: int = 2
    steps: int = 1
    dtype: torch.dtype = torch.float32
    spectra: tuple[Spectrum, ...] = ("flat",)
    rank: int = 1
    log2_scale: tuple[int, ...] = ()
    sparsity: float = 0.0
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0
    order: tuple[int, ...] = ()
    log2_factor: int = 0
    zero_steps: int = 0
    poison: Poison | None = None
    rearranged: bool = False
    period: int = 0
    masked: float = 0.0
    accumulated: bool = False
    groups: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.buckets:
            object.__setattr__(self, "buckets", self.buckets_in_one)
        if sorted(index for bucket in self.buckets for index in bucket) != list(range(len(self.shapes))):
            raise ValueError(f"buckets {self.buckets} don't hold each of {len(self.shapes)} tensors once")
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise ValueError(f"order {self.order} doesn't hold each of {self.world_size} ranks once")

    @property
    def buckets_in_one(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(self.shapes))),)

    @property
    def num_steps(self) -> int:
        """The number of all steps, including steps with zero gradients."""
        return self.steps + self.zero_steps

    @property
    def num_bytes(self) -> int:
        """The bytes of one rank's gradients in one step."""
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize

    def gradients(self, step: int, rank: int) -> list[Tensor]:
        """Make the gradients of a rank in a step, by tensor index, in new tensors."""
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(f"step {step}, rank {rank} of {self.num_steps} steps, {self.world_size} ranks")
        if step >= self.steps:
            return [torch.zeros(shape, dtype=self.dtype, device="cpu") for shape in self.shapes]
        source = self.order[rank] if self.order else rank
        drawn_step = step % self.period if self.period else step
        drawn = [self._draw(drawn_step, source, index) for index in range(len(self.shapes))]
        gradients = [(gradient * 2.0**self.log2_factor).to(self.dtype) for gradient in drawn]
        for index, gradient in enumerate(gradients if self.masked else []):
            gradient[_mask(self.shapes[index], self.masked, self._seed(index))] = 0.0
        if self.poison is not None and self.poison[:2] == (step, rank):
            gradients[self.poison[2]].view(-1)[-1] = self.poison[3]
        return gradients

    @lru_cache(maxsize=64)  # noqa: B019 a few workloads outlive their runs
    def mean(self, step: int) -> list[Tensor]:
        """Return the ranks' mean gradients in float64, by tensor index. They are cached: don't write."""
        return [tensors.mean(0) for tensors in self.stacked(step)]

    @lru_cache(maxsize=64)  # noqa: B019
    def stacked(self, step: int) -> list[Tensor]:
        """Return all ranks' gradients in float64, [world_size, *shape], by tensor index. Don't write."""
        ranks = [self.gradients(step, rank) for rank in range(self.world_size)]
        return [torch.stack(tensors).double() for tensors in zip(*ranks, strict=True)]

    def norm(self, step: int, index: int) -> float:
        """Compute the largest ‖gradient‖ of a tensor on any rank."""
        return float(self.stacked(step)[index].flatten(1).norm(dim=1).max())

    def largest(self, step: int, *indices: int) -> float:
        """Find the largest |element| of these tensors on any rank."""
        tensors = [self.stacked(step)[index] for index in indices]
        return max((float(each.abs().max()) for each in tensors if each.numel()), default=0.0)

    def numel(self, *indices: int) -> int:
        """Count the elements of these tensors."""
        return sum(math.prod(self.shapes[index]) for index in indices)

    def buckets_in(self, step: int) -> tuple[tuple[int, ...], ...]:
        return self.buckets_in_one if self.rearranged and step == 0 else self.buckets

    def bucket_of(self, index: int) -> int:
        return next(bucket for bucket, indices in enumerate(self.buckets) if index in indices)

    def where(self, index: int) -> str:
        """Describe a tensor's shape and bucket, for messages."""
        return f"tensor {index} {list(self.shapes[index])} in bucket {self.bucket_of(index)}"

    @lru_cache(maxsize=4096)  # noqa: B019
    def _draw(self, step: int, rank: int, index: int) -> Tensor:
        """Make one tensor's gradient in float64: a signal of rms 1, plus noise, times the tensor's scale."""
        shape, spectrum = self.shapes[index], self.spectra[min(index, len(self.spectra) - 1)]
        scale = self.log2_scale[min(index, len(self.log2_scale) - 1)] if self.log2_scale else 0
        rows, cols = shape[0] if shape else 1, math.prod(shape[1:])
        if spectrum == "zero" or rows * cols == 0:
            return torch.zeros(shape, dtype=torch.float64, device="cpu")
        step = step if self.drift else 0
        mixed = partial(self._mixed, index, step)
        if spectrum == "ties":
            rank = rank if self.noise else 0
            few = _normal(shape, self._seed(index) * 4 + 2, step, rank) > rank / 2
            signs = mixed(0, shape).sign()
            return signs.where(few, signs / 8) * 2.0**scale
        full = min(rows, cols)
        numbers = torch.arange(1.0, full + 1, dtype=torch.float64, device="cpu")
        spectra = {
            "flat": torch.ones_like(numbers),
            "low_rank": (numbers <= self.rank).double(),
            "power_law": 1.0 / numbers,
            "clustered": torch.ones_like(numbers).masked_fill_(numbers > math.ceil(full / 4), 0.01),
        }
        if spectrum not in spectra:
            raise ValueError(f"spectrum {spectrum!r} is not one of {', '.join(spectra)}, ties, zero")
        singular = spectra[spectrum]
        singular *= math.sqrt(rows * cols) / singular.norm()
        singular = singular[: singular.count_nonzero()]
        k = len(singular)
        drawn = mixed(0, (rows, k)), mixed(1, (cols, k))
        left, right = (each / each.norm() if k == 1 else torch.linalg.qr(each).Q for each in drawn)
        core = singular.diag()
        if self.noise and k < full:
            # ‖N [k, k]‖ is about k, and ‖core‖ is √(rows · cols): the noise's norm is about noise · ‖core‖.
            core = core + mixed(2, (k, k), rank) * (self.noise * math.sqrt(rows * cols) / k)
        gradient: Tensor = left @ core @ right.mT
        if self.noise and k == full:
            gradient = gradient + self.noise * mixed(2, (rows, cols), rank)
        if self.sparsity:
            gradient[mixed(3, (rows,)).argsort()[: int(self.sparsity * rows)]] = 0.0
        return gradient.view(shape) * 2.0**scale

    def _mixed(self, index: int, step: int, part: int, shape: Shape, rank: int = 0) -> Tensor:
        """Draw (1 − drift) · the first step's normal numbers + drift · this step's own."""
        seed = self._seed(index) * 4 + part
        first, own = (_normal(shape, seed, each, rank) for each in (0, step))
        return first if step == 0 else (1 - self.drift) * first + self.drift * own

    def _seed(self, index: int) -> int:
        return self.seed * 1_009 + index

    def __repr__(self) -> str:
        """Format the call that makes this workload, leaving out arguments equal to their defaults."""
        defaults = {each.name: each.default for each in fields(self) if each.repr}
        defaults["buckets"] = self.buckets_in_one
        values = {name: getattr(self, name) for name in defaults}
        shown = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False, eq=False)
class RecordedWorkload(Workload):
    """A workload of given gradients, for example from training: `RecordedWorkload.of(gradients)`."""

    recorded: tuple[tuple[tuple[Tensor, ...], ...], ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, gradients: Sequence[Sequence[Sequence[Tensor]]], buckets: Sequence[Sequence[int]] = ()
    ) -> RecordedWorkload:
        """Make a workload of gradients[step][rank][index].

        Raises ValueError unless all steps and ranks have the same shapes and one dtype.
        """
        recorded = tuple(tuple(tuple(t.detach().cpu() for t in rank) for rank in step) for step in gradients)
        shapes = {tuple(tuple(t.shape) for t in rank) for step in recorded for rank in step}
        dtypes = {t.dtype for step in recorded for rank in step for t in rank}
        sizes = {len(step) for step in recorded}
        if not len(shapes) == len(dtypes) == len(sizes) == 1:
            raise ValueError(f"gradients differ between steps or ranks: {sizes} ranks, {shapes}, {dtypes}")
        return cls(
            shapes=shapes.pop(),
            buckets=tuple(map(tuple, buckets)),
            world_size=sizes.pop(),
            steps=len(recorded),
            dtype=dtypes.pop(),
            recorded=recorded,
        )

    __eq__, __hash__ = object.__eq__, object.__hash__

    def _draw(self, step: int, rank: int, index: int) -> Tensor:  # type: ignore[override]  # not cached
        return self.recorded[step][rank][index].detach().double()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors to a vector in float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


@lru_cache(maxsize=256)
def _mask(shape: Shape, fraction: float, seed: int) -> Tensor:
    """Choose the elements of a tensor that are 0 in every step."""
    rows, cols = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(rows, cols, dtype=torch.bool, device="cpu")
    parts = [(chosen.view(-1), math.ceil(fraction * rows * cols))]
    if len(shape) > 1:
        parts += [(chosen, int(fraction / 2 * rows)), (chosen.mT, int(fraction / 2 * cols))]
    for lines, num in parts:
        lines[torch.randperm(len(lines), generator=generator, dtype=torch.int64, device="cpu")[:num]] = True
    return chosen.view(shape)


@lru_cache(maxsize=256)
def _normal(shape: Shape, seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 65_537 + step) * 257 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
