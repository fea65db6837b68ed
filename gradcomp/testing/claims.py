"""What a hook promises, and what is expected of one that says nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.hooks import powerSGD_hook
from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.run import CheckpointError, Hook, MakeState, Ranks, reload, run_hook
from gradcomp.testing.workload import Shape, Workload

__all__ = ["Claims", "Tolerance", "claims_of", "unit_roundoff"]

# Steps of the probe: compression that starts later has to be claimed.
PROBED_STEPS = 8
LONGEST_START = 16
# A norm of up to 2^20 elements this large still has a square in float32: 2^(2·40+20) < 2^128.
LARGEST_OF_LOSSY = 2.0**40
# Ours takes squares in float64 only: its factors have to fit.
LARGEST_OF_OURS = 2.0**100
# Factors are longer than the gradients, by up to √numel.
LARGEST_OF_LOSSY_FP16 = 2.0**8


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding once to nearest, 2^-p for p significant bits."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Tolerance:
    """Of an average over W ranks: |output − mean| ≤ 2 · W · (relative · magnitude + absolute).

    The 2 · W: each of W addends and of their partial sums is rounded once, and each is at most as large as the
    magnitude. That is the largest |gradient| of all ranks, at the element or in its bucket.
    """

    relative: float
    absolute: float = 0.0
    of: Literal["element", "bucket"] = "element"

    @classmethod
    def rounding(cls, dtype: torch.dtype) -> Tolerance:
        """Of sums in a dtype; absolute: the spacing of its subnormal numbers."""
        u = unit_roundoff(dtype)
        return cls(u, torch.finfo(dtype).smallest_normal * 2 * u)

    @classmethod
    def levels(cls, bits: int) -> Tolerance:
        """Of values rounded to 2^bits levels between a bucket's smallest and largest."""
        return cls(2.0 ** (1 - bits), of="bucket")


@dataclass(frozen=True)
class Claims:
    """What the properties hold a hook to. None or False: not claimed.

    tolerance: of its averages; None: it is lossy. precision: the dtype it rounds to, if coarser than the bucket's.
    start: steps of plain averaging before it compresses.
    exact_rank: a mean of at most this rank comes out exactly. exact_shapes(shape): whether a tensor of this shape
    is averaged exactly although the hook is lossy.
    contraction: δ in ‖M − C(M)‖² ≤ (1 − δ) ‖M‖²; 0 for: it doesn't make things worse.
    error_feedback: what is left out of a step comes in a later one. errors_of(state): the errors of a rank, by bucket,
    flat as the bucket.
    unbiased: the expectation of its output is the mean.
    scale_equivariant: all gradients times 2^k gives the outputs times 2^k, to the bit or within rounding.
    rank_symmetric: the result doesn't depend on which rank has which gradients.
    bucket_insensitive: nor on how tensors are shared out to buckets.
    max_magnitude: outputs are finite while the ranks' mean |gradient| is at most this, at every element.
    checkpoint: a state comes back through torch.load's safe default, or in any way `reload` knows.
    memory: bytes of the tensors a state holds, over the bytes of the gradients.
    """

    tolerance: Tolerance | None = None
    precision: torch.dtype = torch.float64
    start: int = 0
    exact_rank: int | None = None
    exact_shapes: Callable[[Shape], bool] | None = None
    contraction: float | None = None
    error_feedback: bool = False
    errors_of: Callable[[Any], Mapping[int, Tensor]] | None = None
    unbiased: bool = False
    scale_equivariant: Literal["bitwise", "rounding"] | None = None
    rank_symmetric: bool = False
    bucket_insensitive: bool = False
    max_magnitude: float = LARGEST_OF_LOSSY
    checkpoint: Literal["safe", "any"] | None = None
    memory: float | None = None

    @property
    def is_lossy(self) -> bool:
        return self.tolerance is None

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        """Of a bucket's dtype or the hook's own precision, whichever is coarser."""
        return max(unit_roundoff(dtype), unit_roundoff(self.precision))

    def limit(self, dtype: torch.dtype) -> float:
        """Up to which mean |gradient| outputs are finite in a bucket of this dtype."""
        largest = torch.finfo(dtype).max
        if self.is_lossy and largest < LARGEST_OF_LOSSY:
            largest = LARGEST_OF_LOSSY_FP16
        return min(self.max_magnitude, 0.99 * largest)

    def delta(self, numel: int) -> float:
        """What error feedback is held to for a bucket of so many elements: the δ claimed, or 1 / numel where that is
        more, the δ of the weakest of the usual compressors, which send one element, or signs of one length.
        """
        return max(self.contraction or 0.0, 1 / max(1, numel))

    def exact(self, dtype: torch.dtype) -> Tolerance:
        """Of what is averaged without compression, in a bucket of this dtype."""
        return max(
            Tolerance.rounding(dtype), Tolerance.rounding(self.precision), key=lambda each: each.relative
        )


def claims_of(
    hook: Hook, make_state: MakeState = None, device: str = "cpu", ranks: Ranks = "simulated"
) -> Claims:
    """What to expect of a hook, from its state if that is gradcomp's or torch's PowerSGDState, and from a probe.

    The probe is eight steps of random gradients, on this device, on two ranks of this kind. A hook whose averages are within 5 % averages:
    it is held to the tightest tolerance that fits (float32, float16, bfloat16, 8 bits, or twice what was measured).
    Any other is lossy: it compresses from the first step on that isn't exact, and has to make up for it. With a state: it
    claims contraction and error feedback, without which a biased compressor need not converge (Karimireddy et
    al., "Error Feedback Fixes SignSGD", ICML 2019). Without: that it is unbiased.

    What it gets wrong, give as `claims=dataclasses.replace(claims_of(hook, make_state), ...)`.
    Raises ValueError for a state that starts to compress after more than 16 steps, RankError where the hook fails.
    """
    state, checkpoint = run_ranks(partial(_state, make_state), 1)[0] if make_state else (None, None)
    is_power_sgd = all(hasattr(state, name) for name in ("matrix_approximation_rank", "start_powerSGD_iter"))
    start: int | None = getattr(state, "start_powerSGD_iter", None)
    if start is not None and start > LONGEST_START:
        raise ValueError(
            f"start_powerSGD_iter is {start}: every example would run that many plain steps first. Test with a state that "
            "starts earlier, start_powerSGD_iter=2 say"
        )
    claims = _probed(hook, make_state, start, device, ranks)
    if make_state is not None:
        claims = replace(claims, checkpoint=checkpoint, memory=4.0 if claims.is_lossy else 1.0)
    return _of_power_sgd(claims, hook, state) if is_power_sgd else claims


def _state(make_state: Callable[[Any], Any], rank: int, process_group: Any) -> tuple[Any, str | None]:
    """A new state, and how it comes back from a checkpoint."""
    state = make_state(process_group)
    for kind in ("safe", "any"):
        try:
            reload(state, make_state, process_group, safe=kind == "safe")
            return state, kind
        except CheckpointError:
            pass
    return state, None


def _probed(hook: Hook, make_state: MakeState, start: int | None, device: str, ranks: Ranks) -> Claims:
    workload = Workload(((24, 24), (24,)), steps=PROBED_STEPS, noise=1.0, drift=1.0, seed=7, device=device)
    outputs = run_hook(hook, make_state, workload, ranks=ranks).outputs
    plain = [torch.float32, torch.float16, torch.bfloat16]
    fits = [
        next((d for d in plain if _error(workload, outputs, s, Tolerance.rounding(d)) <= 1), None)
        for s in range(PROBED_STEPS)
    ]
    if start is None:
        start = next((step for step, dtype in enumerate(fits) if dtype is None), 0)
    precision = max((d for d in fits[: start or None] if d), key=unit_roundoff, default=torch.float64)
    if None not in fits:
        return _averaging(precision, Tolerance.rounding(precision))
    errors = [
        _error(workload, outputs, step, Tolerance(0.5 / workload.world_size, of="bucket"))
        for step in range(PROBED_STEPS)
    ]
    relative = (
        max(
            float(
                sum((o.double() - m).square().sum() for o, m in zip(out[0], workload.mean(step), strict=True))
            )
            / float(sum(m.square().sum() for m in workload.mean(step)))
            for step, out in enumerate(outputs)
        )
        ** 0.5
    )
    if relative <= 0.05:
        eight_bits = Tolerance.levels(8)
        is_eight_bits = max(_error(workload, outputs, step, eight_bits) for step in range(PROBED_STEPS)) <= 1
        return _averaging(
            torch.float32,
            eight_bits if is_eight_bits else Tolerance(max(errors) / workload.world_size, of="bucket"),
        )
    has_state = make_state is not None
    return Claims(
        precision=torch.float32 if precision == torch.float64 else precision,
        start=start,
        contraction=0.0 if has_state else None,
        error_feedback=has_state,
        unbiased=not has_state,
        scale_equivariant="rounding",
        rank_symmetric=has_state,
        max_magnitude=LARGEST_OF_LOSSY_FP16 if precision == torch.float16 else LARGEST_OF_LOSSY,
    )


def _averaging(precision: torch.dtype, tolerance: Tolerance) -> Claims:
    return Claims(
        tolerance=tolerance,
        precision=precision,
        scale_equivariant="bitwise"
        if precision == torch.float32 and tolerance.of == "element"
        else "rounding",
        rank_symmetric=True,
        bucket_insensitive=True,
        max_magnitude=torch.finfo(precision).max * 0.99 if tolerance.of == "element" else LARGEST_OF_LOSSY,
    )


def _error(workload: Workload, outputs: list[list[list[Tensor]]], step: int, tolerance: Tolerance) -> float:
    """The worst |output − mean| over its tolerance."""
    worst = 0.0
    largest = max(float(t.abs().max()) for t in workload.stacked(step))
    for out, stacked in zip(outputs[step][0], workload.stacked(step), strict=True):
        magnitude = stacked.abs().amax(0) if tolerance.of == "element" else largest
        allowed = 2 * workload.world_size * (tolerance.relative * magnitude + tolerance.absolute)
        worst = max(
            worst, float(((out.double() - stacked.mean(0)).abs() / allowed).nan_to_num(math.inf).max())
        )
    return worst


def _of_power_sgd(claims: Claims, hook: Hook, state: Any) -> Claims:
    """gradcomp's or torch's: what follows from its hyperparameters."""
    rank, rate = state.matrix_approximation_rank, state.min_compression_rate
    is_batched = "batched" in _names(hook)
    is_exact = not state.orthogonalization_epsilon
    keeps_error = state.use_error_feedback
    ours = isinstance(state, powerSGD_hook.PowerSGDState)
    largest = LARGEST_OF_OURS if ours else LARGEST_OF_LOSSY
    return replace(
        claims,
        tolerance=None,
        start=state.start_powerSGD_iter,  # the probe's matrix may be too small to be compressed
        exact_rank=rank if is_exact and not is_batched else None,
        exact_shapes=None if is_batched else partial(_is_not_compressed, rank, rate),
        contraction=0.0,
        error_feedback=keeps_error,
        errors_of=(_our_errors if ours else _torch_errors) if keeps_error else None,
        unbiased=False,
        scale_equivariant="rounding" if is_exact else None,
        rank_symmetric=True,
        bucket_insensitive=False,  # random projections differ from bucket to bucket
        max_magnitude=LARGEST_OF_LOSSY_FP16 if claims.precision == torch.float16 else largest,
        checkpoint="safe",  # as both projects document it
        # The error, and factors, wires and double-precision scratch of (n + m) · r elements, less than n · m / 2 where
        # min_compression_rate is 2.
        memory=6.0,
    )


def _is_not_compressed(rank: int, min_compression_rate: float, shape: Shape) -> bool:
    rows, cols = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
    return not (rows + cols) * min(rows, cols, rank) * min_compression_rate < rows * cols


def _our_errors(state: Any) -> dict[int, Tensor]:
    kept = {index: each["error"] for index, each in state.state_dict()["buckets"].items()}
    return {index: error for index, error in kept.items() if error is not None}


def _torch_errors(state: Any) -> dict[int, Tensor]:
    return dict(state.error_dict)


def _names(hook: Any) -> str:
    """Of a hook and of those it wraps."""
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return " ".join([getattr(hook, "__qualname__", ""), *(_names(each) for each in inner if callable(each))])
