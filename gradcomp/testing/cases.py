"""The properties that check_hook checks: the claim that each needs, and the workloads to search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gradcomp.testing import properties
from gradcomp.testing.claims import PROBE, Claims
from gradcomp.testing.properties.subject import NonFiniteFailure, Property
from gradcomp.testing.ranks import RankError
from gradcomp.testing.strategies import DIMS, poisons, shapes, workloads
from gradcomp.testing.workload import Shape, Workload

__all__ = ["CASES", "Case", "Drawn"]

# Further sides of matrices, for hooks that don't compress matrices as small as DIMS.
LARGER_DIMS = range(96, 2049, 32)
# Tensors of all kinds, as a hook may have separate code for each: one element, square, wide, tall, one row,
# one column, vectors, kernels of convolutions, more elements than 2^16.
VARIOUS: tuple[tuple[Shape, ...], ...] = (
    ((1,), (8, 8), (31, 33), (300,), (96, 700)),
    ((64, 3), (3, 64), (16, 4, 3, 3), (5, 7, 9), (128, 128)),
    ((1, 257), (257, 1), (24, 24), (1000,), (12, 12)),
)
# Tensors for runs of many steps.
FEW: tuple[tuple[Shape, ...], ...] = (((24, 24), (7,)), ((9, 32), (3, 5, 3, 3)), ((17, 8), (24,)))
# The number of steps after a hook's start in such a run. A mistake in every 25th step shows twice.
LONG = 56


@dataclass(frozen=True)
class Drawn:
    """Strategies and lists of workloads within the limits of a hook's claims."""

    claims: Claims
    world_size: int
    dtypes: Sequence[torch.dtype]
    device: str

    def any(self, extra_steps: int = 3, **options: Any) -> SearchStrategy[Workload]:
        """Draw workloads of all kinds, with 1 to `extra_steps` steps after the plain ones."""
        start = self.claims.start
        options.setdefault("steps", st.integers(start + 1, start + extra_steps))
        options.setdefault("tensors", self._shapes())
        return workloads(
            world_sizes=st.just(self.world_size),
            dtypes=st.sampled_from(list(self.dtypes)),
            log2_scales=self._scales(),
            device=self.device,
            **options,
        )

    def poisoned(self) -> SearchStrategy[Workload]:
        steps = st.integers(0, self.claims.start + 1)
        return self.any(poison=poisons(steps, self.world_size))

    def every_poison(self) -> Iterator[Workload]:
        """List workloads with inf, −inf or NaN on one rank, for each rank.

        Each value comes in a plain step, in the first compressed step and in the last step, and each time in
        a compressed matrix or in the vector beside it.
        """
        matrix = (8, 9) if self._is_compressed((8, 9)) else min(self._compressed_shapes(), key=math.prod)
        workload = self._listed((matrix, (3,)), steps=self.claims.start + 2)
        steps = sorted({0, self.claims.start, self.claims.start + 1})
        values = (math.inf, -math.inf, math.nan)
        for poison in product(steps, range(self.world_size), range(2), values):
            yield replace(workload, poison=poison)

    def rearranged(self) -> SearchStrategy[Workload]:
        """Draw workloads that rearrange their buckets after the first step."""
        return self.any(num_tensors=(2, 5), extra_steps=2, rearranged=st.just(True)).filter(
            lambda workload: len(workload.buckets) > 1 < workload.steps
        )

    def small(self) -> SearchStrategy[Workload]:
        return self.any(tensors=shapes(max_numel=64), num_tensors=(1, 2), noises=(0.1, 1.0))

    def flushed(self) -> Sequence[SearchStrategy[Workload]]:
        """Draw workloads that end with zero gradients.

        There are a few zero steps or, for small tensors, enough that little error may be left.
        """
        options: dict[str, Any] = {
            "tensors": shapes(max_numel=25),
            "steps": st.integers(self.claims.start + 2, self.claims.start + 24),
            "spectra": st.just(("flat",)),
            "rearranged": st.booleans(),
        }
        alike = self.any(
            num_tensors=(2, 2), same_shapes=st.just(True), noises=(0.0,), drifts=(0.1, 1.0), **options
        )
        different = self.any(num_tensors=(1, 1), noises=(1.0, 10.0), **options)
        return (
            self.any(extra_steps=6, noises=(0.0,), zero_steps=self._few, rearranged=st.booleans()),
            alike.map(self._with_zeros),
            different.map(self._with_zeros),
        )

    @property
    def _few(self) -> int:
        """The least number of zero steps.

        4 for a hook that averages, as its errors soon fall below its quantization levels; otherwise 16.
        """
        return 16 if self.claims.element_error >= 1 else 4

    def _with_zeros(self, workload: Workload) -> Workload:
        """Add enough zero steps that the held-back error may be a quarter of the largest gradient at most.

        If all ranks have the same gradients, add twice the number of steps after which at most half of the
        error is left.
        """
        numel = max(
            sum(math.prod(workload.shapes[index]) for index in indices) for indices in workload.buckets
        )
        if workload.noise:
            zero_steps = self.claims.steps_until(1 / 4 / max(1.0, self.claims.largest_error(numel)), numel)
        else:
            zero_steps = 2 * self.claims.steps_until(1 / 2, numel)
        return replace(workload, zero_steps=max(self._few, zero_steps))

    def various(self, **options: Any) -> Iterator[Workload]:
        """List a workload of tensors of all kinds in three buckets."""
        yield self._in_buckets(VARIOUS, steps=self.claims.start + 2, **options)

    def probed(self) -> Iterator[Workload]:
        """List the workload from which claims are inferred."""
        yield replace(PROBE, world_size=self.world_size, dtype=self.dtypes[0], device=self.device)

    def long(self, **options: Any) -> Iterator[Workload]:
        """List a workload of many steps, in buckets that are rearranged after the first one."""
        steps = self.claims.start + LONG
        yield self._in_buckets(FEW, **{"steps": steps, "drift": 1.0, "rearranged": True, **options})

    def _in_buckets(self, buckets: Sequence[Sequence[Shape]], **options: Any) -> Workload:
        num = iter(range(sum(map(len, buckets))))
        indices = tuple(tuple(next(num) for _ in each) for each in buckets)
        return self._listed(tuple(shape for each in buckets for shape in each), buckets=indices, **options)

    def odd(self) -> Iterator[Workload]:
        """List workloads of one compressed matrix with an odd number of rows or columns between 16 and 64."""
        for shape in self._odd_shapes():
            yield self._listed((shape,), steps=self.claims.start + 3)

    def _listed(self, shapes: tuple[Shape, ...], **options: Any) -> Workload:
        options = {"noise": 1.0, "drift": 0.5, **options}
        return Workload(
            shapes, world_size=self.world_size, dtype=self.dtypes[0], device=self.device, **options
        )

    def _shapes(self) -> SearchStrategy[Shape]:
        """Draw shapes. The hook compresses about half of them, even at a high rank."""
        return shapes() | st.sampled_from(self._compressed_shapes()) if self.claims.exact_shapes else shapes()

    def _compressed_shapes(self) -> list[Shape]:
        """List compressed matrices: all with sides in DIMS, or a larger one; and those of _odd_shapes."""
        small = [shape for shape in product(DIMS, DIMS) if self._is_compressed(shape)]
        large = [(side, side) for side in LARGER_DIMS if self._is_compressed((side, side))]
        return [*(small or large[:1] or [(1, 1)]), *self._odd_shapes()]

    def _odd_shapes(self) -> list[Shape]:
        """List the smallest compressed matrix with each odd number of rows in 17 … 63, and of columns."""
        columns = (*DIMS, *LARGER_DIMS)
        found: list[Shape] = []
        for side in (dim for dim in DIMS if 16 < dim < 64 and dim % 2):
            found += [(side, other) for other in columns if self._is_compressed((side, other))][:1]
            found += [(other, side) for other in columns if self._is_compressed((other, side))][:1]
        return found

    def _is_compressed(self, shape: Shape) -> bool:
        return self.claims.exact_shapes is None or not self.claims.exact_shapes(shape)

    def _scales(self) -> tuple[int, int]:
        """Return the least and largest log2_scale, each 2^8 away from subnormal numbers or overflow."""
        limit = min(self.claims.limit(dtype) for dtype in self.dtypes)
        dtypes = [*self.dtypes, self.claims.precision]
        smallest = max(torch.finfo(dtype).smallest_normal for dtype in dtypes)
        return max(-40, math.frexp(smallest)[1] + 8), min(40, max(0, math.frexp(limit)[1] - 9))


@dataclass(frozen=True)
class Case:
    """A property, and the search for a workload on which it fails.

    check: the property.
    workloads(drawn): strategies that draw the property's workloads.
    measure: the name of the value that the property returns.
    worst: chooses the worse of two such values.
    fraction: the fraction of max_examples to draw; less than 1 for expensive properties.
    explains: the exceptions that other properties raise if this one fails.
    listed(drawn): workloads to try besides the drawn ones.
    """

    check: Property[Any]
    workloads: Callable[[Drawn], Sequence[SearchStrategy[Workload]]] = lambda drawn: [drawn.any()]
    measure: str = ""
    worst: Callable[[float, float], float] = max
    fraction: float = 1.0
    explains: tuple[type[AssertionError], ...] = ()
    listed: Callable[[Drawn], Iterable[Workload]] = lambda drawn: ()

    @property
    def name(self) -> str:
        return self.check.__name__


CASES = (
    Case(
        properties.completes,
        lambda drawn: [drawn.any(extra_steps=2), drawn.rearranged()],
        explains=(RankError,),
    ),
    Case(properties.finite_in_finite_out, measure="up to", explains=(NonFiniteFailure,)),
    Case(properties.replicas_identical, listed=lambda drawn: drawn.long()),
    Case(properties.deterministic),
    Case(
        properties.averages,
        listed=lambda drawn: [*drawn.various(), *drawn.long()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.zero_stays_zero,
        lambda drawn: [drawn.any(masked=0.5)],
        listed=lambda drawn: [*drawn.various(masked=0.5), *drawn.long(masked=0.5)],
    ),
    Case(
        properties.exact_up_to_rank,
        listed=lambda drawn: [*drawn.odd(), *drawn.various()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.contraction,
        listed=lambda drawn: [*drawn.odd(), *drawn.various(), *drawn.long()],
        measure="δ ≥",
        worst=min,
    ),
    Case(
        properties.error_feedback_identity,
        listed=lambda drawn: [*drawn.various(), *drawn.long()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.held_back_comes_out,
        lambda drawn: drawn.flushed(),
        "still held at the end ≤",
        fraction=0.5,
        listed=lambda drawn: drawn.long(noise=0.0, zero_steps=16),
    ),
    Case(properties.no_error_where_exact),
    Case(
        properties.unbiased,
        lambda drawn: [drawn.small()],
        "t ≤",
        fraction=0.3,
        listed=lambda drawn: [*drawn.probed(), *drawn.long()],
    ),
    Case(properties.scale_equivariant, measure="difference / tolerance ≤"),
    Case(properties.rank_permutation, measure="difference / tolerance ≤"),
    Case(properties.bucket_insensitive, measure="difference / tolerance ≤"),
    Case(
        properties.nonfinite_seen_by_all,
        lambda drawn: [drawn.poisoned()],
        listed=lambda drawn: drawn.every_poison(),
    ),
    Case(properties.checkpoint_round_trip, lambda drawn: [drawn.any(extra_steps=4)]),
    Case(properties.bounded_memory, measure="state / gradients ≤"),
)
