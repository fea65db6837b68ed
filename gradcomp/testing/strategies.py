"""Hypothesis strategies that draw workloads. A workload shrinks to one 1×1 tensor, scale 1, seed 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gradcomp.testing.workload import Poison, Shape, Spectrum, Workload

__all__ = ["buckets_of", "dtypes", "poisons", "shapes", "spectra", "workloads"]

# Small dimensions, primes, powers of two and their neighbors.
DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 64)
SPECTRA: tuple[Spectrum, ...] = ("flat", "low_rank", "power_law", "clustered", "zero")


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


def spectra() -> SearchStrategy[tuple[Spectrum, ...]]:
    """Draw the spectra of a workload's tensors, in the order of the tensors."""
    return st.lists(st.sampled_from(SPECTRA), min_size=1, max_size=4).map(tuple)


_spectra = spectra  # a parameter of `workloads` has the same name


def dtypes() -> SearchStrategy[torch.dtype]:
    return st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def buckets_of(
    num_tensors: int, cuts: Sequence[bool] = (), reverse: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Divide tensors 0 … num_tensors − 1 into buckets.

    cuts: by position, True if a bucket ends there.
    reverse: take the tensors in reverse order, like DDP.
    """
    order = list(range(num_tensors))[:: -1 if reverse else 1]
    buckets = [[order[0]]]
    for position, index in enumerate(order[1:]):
        if position < len(cuts) and cuts[position]:
            buckets.append([])
        buckets[-1].append(index)
    return tuple(map(tuple, buckets))


def poisons(steps: SearchStrategy[int], world_size: int) -> SearchStrategy[Poison]:
    """Draw poisons (step, rank, tensor index 0, value): the value is inf, −inf or NaN."""
    values = st.sampled_from((math.inf, -math.inf, math.nan))
    return st.tuples(steps, st.integers(0, world_size - 1), st.just(0), values)


def workloads(
    *,
    tensors: SearchStrategy[Shape] | None = None,
    num_tensors: tuple[int, int] = (1, 5),
    same_shapes: SearchStrategy[bool] | None = None,
    world_sizes: SearchStrategy[int] | None = None,
    steps: SearchStrategy[int] | None = None,
    dtypes: SearchStrategy[torch.dtype] | None = None,
    spectra: SearchStrategy[tuple[Spectrum, ...]] | None = None,
    log2_scales: tuple[int, int] = (-40, 40),
    noises: Sequence[float] = (0.0, 0.1, 1.0, 10.0),
    drifts: Sequence[float] = (0.0, 0.1, 1.0),
    zero_steps: int = 0,
    poison: SearchStrategy[Poison] | None = None,
    rearranged: SearchStrategy[bool] | None = None,
    masked: float = 0.0,
    device: str = "cpu",
) -> SearchStrategy[Workload]:
    """Draw workloads like a training run's: any spectrum, scale, sparsity and buckets.

    tensors: the tensors' shapes; by default `shapes()`.
    num_tensors: the least and largest number of tensors.
    same_shapes: True gives all tensors the first one's shape; by default True or False is drawn.
    world_sizes: by default 1 to 4.
    steps: by default 1 to 3.
    dtypes: by default float32.
    spectra: the spectra of the tensors; by default `spectra()`.
    log2_scales: the least and largest log2_scale; each tensor draws its own.
    noises, drifts: the values of Workload.noise and Workload.drift to choose from.
    zero_steps, masked, device: see Workload.
    poison: by default None.
    rearranged: True if buckets are rearranged after the first step; by default False.
    """
    scale = st.integers(0, log2_scales[1]) | st.integers(log2_scales[0], log2_scales[1])
    return st.builds(
        _workload,
        shapes=st.lists(
            shapes() if tensors is None else tensors, min_size=num_tensors[0], max_size=num_tensors[1]
        ),
        same_shapes=st.booleans() if same_shapes is None else same_shapes,
        cuts=st.lists(st.booleans(), max_size=num_tensors[1] - 1),
        reverse=st.booleans(),
        world_size=st.integers(1, 4) if world_sizes is None else world_sizes,
        steps=st.integers(1, 3) if steps is None else steps,
        dtype=st.just(torch.float32) if dtypes is None else dtypes,
        spectra=_spectra() if spectra is None else spectra,
        rank=st.integers(1, 4),
        log2_scale=st.lists(scale, max_size=num_tensors[1]),
        sparsity=st.sampled_from((0.0, 0.5, 0.9)),
        noise=st.sampled_from(noises),
        drift=st.sampled_from(drifts),
        seed=st.integers(0, 2**16),
        zero_steps=st.just(zero_steps),
        poison=st.none() if poison is None else poison,
        rearranged=st.just(False) if rearranged is None else rearranged,
        masked=st.just(masked),
        device=st.just(device),
    )


def _workload(
    shapes: list[Shape],
    same_shapes: bool,
    cuts: list[bool],
    reverse: bool,
    spectra: tuple[Spectrum, ...],
    log2_scale: list[int],
    **options: object,
) -> Workload:
    num = len(shapes)
    return Workload(
        shapes=tuple(shapes[:1] * num if same_shapes else shapes),  # like the layers of a deep model
        buckets=buckets_of(num, cuts, reverse),
        # The last value applies to all further tensors, so it needs no repetition.
        spectra=_without_repetition(spectra[:num]),
        log2_scale=_without_repetition(tuple(log2_scale[:num])),
        **options,  # type: ignore[arg-type]
    )


def _without_repetition(values: tuple) -> tuple:  # type: ignore[type-arg]
    while len(values) > 1 and values[-1] == values[-2]:
        values = values[:-1]
    return () if values == (0,) else values
