"""Workloads: the gradients that the ranks of a run give a hook, as a recipe that can be read and pasted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Poison", "RecordedWorkload", "Spectrum", "Workload"]

Shape = tuple[int, ...]
Poison = tuple[int, int, int, float]
Spectrum = Literal["flat", "low_rank", "power_law", "clustered", "zero"]


@dataclass(frozen=True, repr=False)
class Workload:
    """Gradients of `world_size` ranks over `steps` steps: a common signal, and every rank's noise around it.

    shapes: of the tensors. buckets: the indices of the tensors in each bucket, in the order in which buckets are
    averaged; () for one bucket with all of them. rearranged: they are so from the second step on; in the first, all
    tensors are in one bucket, as in DDP.
    spectra: the singular values of the tensors' signals, tensor after tensor (the last for all that follow); a tensor is
    a matrix, its first dimension against the others.

        flat        all the same                    power_law   1, 1/2, 1/3, ...
        low_rank    `rank` equal ones, then 0       clustered   one in four 1, the others 1/100
        zero        no gradient at all

    log2_scale: the rms of a tensor's signal is 2 to this power, tensor after tensor in the same way; () for 0.
    sparsity: the part of the rows (of a vector: elements) that are 0, the same ones on every rank.
    noise: rms of a rank's own part against the signal's. In a low-rank matrix it lies in the signal's columns and rows, so
    that the mean has that rank too. drift: how far a step's gradient goes from the first step's: 0 none, 1 all new.

    What is done to the gradients then: order: rank i is given those of rank order[i]; () as they are.
    log2_factor: all are multiplied by 2 to this power. zero_steps: so many steps with zero gradients follow.
    poison: (step, rank, index, value): the middle element of that tensor is that value, inf say.
    device: where the hook finds them in its buckets; all the rest is on the CPU.

    Every gradient is a function of the recipe: drawn in float64, multiplied, rounded to dtype.
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
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.buckets:
            object.__setattr__(self, "buckets", (tuple(range(len(self.shapes))),))
        if sorted(index for bucket in self.buckets for index in bucket) != list(range(len(self.shapes))):
            raise ValueError(f"buckets {self.buckets} don't hold each of {len(self.shapes)} tensors once")
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise ValueError(f"order {self.order} doesn't hold each of {self.world_size} ranks once")

    @property
    def num_steps(self) -> int:
        """Steps altogether, those with zero gradients included."""
        return self.steps + self.zero_steps

    @property
    def num_bytes(self) -> int:
        """The bytes of one rank's gradients in one step."""
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize

    def gradients(self, step: int, rank: int) -> list[Tensor]:
        """The gradients of a rank in a step, by tensor index: fresh tensors."""
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(f"step {step}, rank {rank} of {self.num_steps} steps, {self.world_size} ranks")
        if step >= self.steps:
            return [torch.zeros(shape, dtype=self.dtype) for shape in self.shapes]
        source = self.order[rank] if self.order else rank
        factor = 2.0**self.log2_factor
        drawn = [self._draw(step, source, index) for index in range(len(self.shapes))]
        gradients = [torch.mul(gradient, factor).to(self.dtype) for gradient in drawn]
        if self.poison is not None and self.poison[:2] == (step, rank):
            poisoned = gradients[self.poison[2]].view(-1)
            poisoned[poisoned.numel() // 2] = self.poison[3]
        return gradients

    def mean(self, step: int) -> list[Tensor]:
        """The ranks' mean in float64, by tensor index."""
        return [tensors.mean(0) for tensors in self.stacked(step)]

    def stacked(self, step: int) -> list[Tensor]:
        """All ranks' gradients in float64, [world_size, *shape], by tensor index. Not to be written to."""
        return _stacked(self, step)

    def buckets_in(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The buckets of a step."""
        return (tuple(range(len(self.shapes))),) if self.rearranged and step == 0 else self.buckets

    def bucket_of(self, index: int) -> int:
        return next(bucket for bucket, indices in enumerate(self.buckets) if index in indices)

    def where(self, index: int) -> str:
        """The place of a tensor, for messages."""
        return f"tensor {index} {list(self.shapes[index])} in bucket {self.bucket_of(index)}"

    def _draw(self, step: int, rank: int, index: int) -> Tensor:
        spectrum = self.spectra[min(index, len(self.spectra) - 1)]
        scale = self.log2_scale[min(index, len(self.log2_scale) - 1)] if self.log2_scale else 0
        recipe = (self.shapes[index], spectrum, self.rank, self.sparsity, self.noise, self.drift)
        return _gradient(*recipe, self.seed * 1_009 + index, step, rank) * 2.0**scale

    def __repr__(self) -> str:
        """The call that makes this workload, without arguments that have their defaults."""
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            is_default = value == each.default or (
                each.name == "buckets" and len(value) == 1 and value[0] == (*range(len(self.shapes)),)
            )
            if each.repr and not is_default:
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False, eq=False)
class RecordedWorkload(Workload):
    """A workload of given gradients, recorded in a training run say: `RecordedWorkload.of(gradients)`."""

    recorded: tuple[tuple[tuple[Tensor, ...], ...], ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, gradients: Sequence[Sequence[Sequence[Tensor]]], buckets: Sequence[Sequence[int]] = ()
    ) -> RecordedWorkload:
        """A workload of gradients[step][rank][index], of the same shapes and one dtype in every step and on every rank.

        Raises ValueError where they aren't.
        """
        recorded = tuple(tuple(tuple(t.detach().cpu() for t in rank) for rank in step) for step in gradients)
        kinds = {tuple((tuple(t.shape), t.dtype) for t in rank) for step in recorded for rank in step}
        sizes = {len(step) for step in recorded}
        if len(kinds) != 1 or len(sizes) != 1 or len({dtype for _, dtype in min(kinds, key=len)}) != 1:
            raise ValueError(f"gradients differ between steps or ranks: {sizes} ranks, {kinds}")
        (kind,) = kinds
        return cls(
            shapes=tuple(shape for shape, _ in kind),
            buckets=tuple(map(tuple, buckets)),
            world_size=len(recorded[0]),
            steps=len(recorded),
            dtype=kind[0][1],
            recorded=recorded,
        )

    __eq__, __hash__ = object.__eq__, object.__hash__

    def _draw(self, step: int, rank: int, index: int) -> Tensor:
        return self.recorded[step][rank][index].detach().double()


@lru_cache(maxsize=64)
def _stacked(workload: Workload, step: int) -> list[Tensor]:
    ranks = [workload.gradients(step, rank) for rank in range(workload.world_size)]
    return [torch.stack(tensors).double() for tensors in zip(*ranks, strict=True)]


@lru_cache(maxsize=4096)
def _gradient(
    shape: Shape,
    spectrum: Spectrum,
    rank_of_matrix: int,
    sparsity: float,
    noise: float,
    drift: float,
    seed: int,
    step: int,
    rank: int,
) -> Tensor:
    """One tensor's gradient, before it is scaled; its signal has rms 1."""
    rows = shape[0] if shape else 1
    cols = math.prod(shape[1:])
    if spectrum == "zero" or rows * cols == 0:
        return torch.zeros(shape, dtype=torch.float64)
    full = min(rows, cols)
    singular = torch.zeros(full, dtype=torch.float64)
    if spectrum == "flat":
        singular.fill_(1.0)
    elif spectrum == "low_rank":
        singular[:rank_of_matrix] = 1.0
    elif spectrum == "power_law":
        singular = 1.0 / torch.arange(1.0, full + 1, dtype=torch.float64)
    elif spectrum == "clustered":
        singular.fill_(0.01)[: -(-full // 4)] = 1.0
    else:
        raise ValueError(f"spectrum {spectrum!r} is none of flat, low_rank, power_law, clustered, zero")
    singular *= math.sqrt(rows * cols) / singular.norm()
    singular = singular[: singular.count_nonzero()]
    k, when = len(singular), step if drift else 0
    left, right = _basis(rows, k, seed * 4, drift, when), _basis(cols, k, seed * 4 + 1, drift, when)
    core = singular.diag()
    if noise and k < full:
        # ‖noise · √(rows · cols) / k · N‖ is about noise times ‖core‖.
        core = core + _mixed((k, k), seed * 4 + 2, drift, when, rank) * (noise * math.sqrt(rows * cols) / k)
    gradient = left @ core @ right.mT
    if noise and k == full:
        gradient = gradient + noise * _mixed((rows, cols), seed * 4 + 2, drift, when, rank)
    if sparsity:
        chosen = _mixed((rows,), seed * 4 + 3, drift, when).argsort()[: int(sparsity * rows)]
        gradient[chosen] = 0.0
    return gradient.view(shape)


@lru_cache(maxsize=1024)
def _basis(rows: int, k: int, seed: int, drift: float, step: int) -> Tensor:
    """k orthonormal columns."""
    drawn = _mixed((rows, k), seed, drift, step)
    basis: Tensor = drawn / drawn.norm() if k == 1 else torch.linalg.qr(drawn).Q
    return basis


def _mixed(shape: Shape, seed: int, drift: float, step: int, rank: int = 0) -> Tensor:
    """Normal numbers that drift from the first step's to this step's own."""
    first = _normal(shape, seed, 0, rank)
    return first if step == 0 else (1 - drift) * first + drift * _normal(shape, seed, step, rank)


def _normal(shape: Shape, seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 65_537 + step) * 257 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
