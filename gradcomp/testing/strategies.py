"""Hypothesis strategies that draw workloads. A workload shrinks to one 1×1 tensor, scale 1, seed 0.

`Drawn` has those that check_hook uses, within the limits of a hook's claims, and lists of further workloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gradcomp.testing.claims import PROBE, Claims
from gradcomp.testing.workload import Poison, Shape, Spectrum, Workload

__all__ = ["shapes", "workloads"]

# Small dimensions, primes, powers of two and their neighbors.
DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 64)
SPECTRA: tuple[Spectrum, ...] = ("flat", "low_rank", "power_law", "clustered", "ties", "zero")
# Further sides of matrices, for hooks that don't compress matrices as small as DIMS.
LARGER_DIMS = range(96, 2049, 32)
# Tensors of all kinds, as a hook may have separate code for each: one element, square, wide, tall, one row,
# one column, vectors, kernels of convolutions, more elements than 2^16.
VARIOUS: tuple[tuple[Shape, ...], ...] = (
    ((1,), (8, 8), (31, 33), (300,), (96, 700)),
    ((64, 3), (3, 64), (16, 4, 3, 3), (5, 7, 9), (128, 128)),
    ((1, 257), (257, 1), (24, 24), (1000,), (12, 12)),
)
# Tensors for runs of many steps, or ranks.
FEW: tuple[tuple[Shape, ...], ...] = (((24, 24), (7,)), ((9, 32), (3, 5, 3, 3)), ((17, 8), (24,)))
NOT_FINITE = (math.inf, -math.inf, math.nan)
# The world sizes by default: those that are drawn, and more that listed workloads have.
WORLD_SIZES = (2, 3, 4, 5, 16, 1)
# Listed workloads by name: buckets, the number of steps after a hook's start, further fields. `world` and
# `other` are positions in the world sizes and dtypes of the call.
LISTED: dict[str, tuple[tuple[tuple[Shape, ...], ...], int, dict[str, Any]]] = {
    "various": (VARIOUS, 2, {}),
    "large": ((((96, 700), (1500,)),), 3, {}),  # over 2^16 elements, no multiple of 2^10
    # A mistake in every 25th step shows twice, and one at the end of a warm-up of up to 50 steps once.
    "long": (FEW, 56, {"drift": 1.0, "rearranged": True}),
    "longer": ((((9, 8), (7,)),), 256, {"drift": 1.0}),
    "ties": (FEW, 8, {"spectra": ("ties",), "drift": 1.0, "world": 1, "other": 1}),
    "four": (FEW, 3, {"accumulated": True, "world": 2, "other": 1}),
    "five": (FEW, 3, {"world": 3}),
    "sixteen": ((((3, 4),),), 3, {"world": 4, "noise": 0.1}),
    "one": (FEW, 3, {"world": 5}),
    "bf16": (FEW, 3, {"dtype": torch.bfloat16}),
    "many": (((((4,),) * 8),), 2, {}),
    "groups": (FEW, 3, {"groups": 2}),
    "probed": ((PROBE.shapes,), PROBE.steps, {"drift": PROBE.drift, "seed": PROBE.seed}),
    "twins": ((((9, 8), (7,)), ((9, 8), (7,))), 3, {"drift": 1.0}),
}


def shapes(max_numel: int = 4096) -> SearchStrategy[Shape]:
    """Draw shapes of matrices, vectors, convolution kernels and embeddings of at most max_numel elements."""
    dims = st.sampled_from(DIMS)
    small, kernel = st.integers(1, 8), st.integers(1, 3)
    of_any_size = st.one_of(
        st.tuples(dims, dims),
        st.tuples(dims),
        st.tuples(small, small, kernel, kernel),
        st.tuples(st.sampled_from((1, 101, 256, 500)), small),
    )
    return of_any_size.filter(lambda shape: math.prod(shape) <= max_numel)


def workloads(
    *,
    tensors: SearchStrategy[Shape] | None = None,
    num_tensors: tuple[int, int] = (1, 5),
    log2_scales: tuple[int, int] = (-40, 40),
    **fields: Any,
) -> SearchStrategy[Workload]:
    """Draw workloads like a training run's: any spectrum, scale, sparsity and buckets.

    tensors: the tensors' shapes; by default `shapes()`.
    num_tensors: the least and largest number of tensors.
    log2_scales: the least and largest log2_scale; each tensor draws its own.
    fields: other fields of Workload, strategies or values; and same_shapes, True if all tensors have the
        first one's shape. By default 1 to 4 ranks, 1 to 3 steps, float32.
    """
    scale = st.integers(0, log2_scales[1]) | st.integers(log2_scales[0], log2_scales[1])
    least, most = num_tensors
    drawn = {
        "shapes": st.lists(shapes() if tensors is None else tensors, min_size=least, max_size=most),
        "same_shapes": st.booleans(),
        "cuts": st.lists(st.booleans(), max_size=most - 1),
        "reverse": st.booleans(),
        "world_size": st.integers(1, 4),
        "steps": st.integers(1, 3),
        "spectra": st.lists(st.sampled_from(SPECTRA), min_size=1, max_size=4).map(tuple),
        "rank": st.integers(1, 4),
        "log2_scale": st.lists(scale, max_size=most).map(tuple),
        "sparsity": st.sampled_from((0.0, 0.5, 0.9)),
        "noise": st.sampled_from((0.0, 0.1, 1.0, 10.0)),
        "drift": st.sampled_from((0.0, 0.1, 1.0)),
        "seed": st.integers(0, 2**16),
    }
    given = {
        name: each if isinstance(each, SearchStrategy) else st.just(each) for name, each in fields.items()
    }
    return st.builds(_workload, **drawn | given)


def _workload(
    shapes: list[Shape], same_shapes: bool, cuts: list[bool], reverse: bool, **options: Any
) -> Workload:
    num = len(shapes)
    alike = shapes[:1] * num if same_shapes else shapes  # like the layers of a deep model
    order = range(num)[:: -1 if reverse else 1]  # in reverse, like DDP
    ends = [position for position, is_end in enumerate(cuts[: num - 1], 1) if is_end]
    buckets = tuple(tuple(order[start:end]) for start, end in pairwise([0, *ends, num]))
    return Workload(tuple(alike), buckets, **options)


@dataclass(frozen=True)
class Drawn:
    """Strategies and lists of workloads within the limits of a hook's claims. left_out: names in LISTED."""

    claims: Claims
    world_sizes: Sequence[int]
    dtypes: Sequence[torch.dtype]
    device: str
    left_out: tuple[str, ...] = ("bf16",)

    def any(self, extra_steps: int = 3, max_numel: int = 4096, **options: Any) -> SearchStrategy[Workload]:
        """Draw workloads of all kinds, with 1 to `extra_steps` steps after the plain ones."""
        start, tensors = self.claims.start, shapes(max_numel)
        if self.claims.exact_shapes:  # the hook compresses about half of the tensors, even at a high rank
            tensors |= st.sampled_from(self._compressed_shapes())
        # Scales are 2^8 away from subnormal numbers and from overflow.
        limit = min(self.claims.limit(dtype) for dtype in self.dtypes)
        dtypes = [*self.dtypes, self.claims.precision]
        smallest = max(torch.finfo(dtype).smallest_normal for dtype in dtypes)
        scales = max(-40, math.frexp(smallest)[1] + 8), min(40, max(0, math.frexp(limit)[1] - 9))
        defaults: dict[str, Any] = {
            "tensors": tensors,
            "log2_scales": scales,
            "world_size": st.sampled_from(list(self.world_sizes[:2])),
            "steps": st.integers(start + 1, start + extra_steps),
            "dtype": st.sampled_from(list(self.dtypes)),
            "device": self.device,
        }
        return workloads(**defaults | options)

    def poisons(self, num_tensors: int = 1) -> list[Poison]:
        """List inf, −inf and NaN on each rank, in each tensor, in each kind of step."""
        steps = sorted({0, self.claims.start, self.claims.start + 1})
        return list(product(steps, range(min(self.world_sizes[:2])), range(num_tensors), NOT_FINITE))

    def every_poison(self) -> list[Workload]:
        """List workloads with one of the poisons in a matrix or vector."""
        matrix = min(self._compressed_shapes(), key=math.prod) if self.claims.is_exact((8, 9)) else (8, 9)
        workload = self._listed((matrix, (3,)), steps=self.claims.start + 2)
        return [replace(workload, poison=poison) for poison in self.poisons(2)]

    def listed(self, *names: str, **options: Any) -> Iterator[Workload]:
        """List these workloads of LISTED, with other options."""
        for name in (each for each in names if each not in self.left_out):
            buckets, steps, fields = LISTED[name]
            numbers = iter(range(sum(map(len, buckets))))
            indices = tuple(tuple(islice(numbers, len(of_bucket))) for of_bucket in buckets)
            tensors = tuple(shape for of_bucket in buckets for shape in of_bucket)
            given = {"steps": self.claims.start + steps, "buckets": indices, **fields, **options}
            yield self._listed(tensors, **given)

    def odd(self) -> list[Workload]:
        """List the smallest compressed matrices with each odd number of rows, or of columns, in 17 … 63."""
        found: list[Shape] = []
        for side in (dim for dim in DIMS if 16 < dim < 64 and dim % 2):
            for shapes in (product((side,), (*DIMS, *LARGER_DIMS)), product((*DIMS, *LARGER_DIMS), (side,))):
                found += [shape for shape in shapes if not self.claims.is_exact(shape)][:1]
        return [self._listed((shape,), steps=self.claims.start + 3) for shape in found]

    def _listed(self, shapes: tuple[Shape, ...], world: int = 0, other: int = 0, **options: Any) -> Workload:
        dtype = self.dtypes[other % len(self.dtypes)]
        fields = {"noise": 1.0, "drift": 0.5, "device": self.device, "dtype": dtype, **options}
        return Workload(shapes, world_size=self.world_sizes[world % len(self.world_sizes)], **fields)

    def _compressed_shapes(self) -> list[Shape]:
        """List the compressed matrices with sides in DIMS (a larger one if there is none), then odd ones."""
        small = [shape for shape in product(DIMS, DIMS) if not self.claims.is_exact(shape)]
        large = [(side, side) for side in LARGER_DIMS if not self.claims.is_exact((side, side))]
        return [*(small or large[:1] or [(1, 1)]), *(shape for each in self.odd() for shape in each.shapes)]
