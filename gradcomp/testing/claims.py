"""Claims: a hook's promises. Its compressor declares them; a probe infers the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.compress import CompressorState
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions
from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.run import CheckpointError, ErrorsOf, MakeState, Ranks, Run, reload, run_hook
from gradcomp.testing.workload import Shape, Workload

# The squared norm of 2^20 elements this large fits in float32: 2^(2·40+20) < 2^128.
LARGEST_OF_LOSSY = 2.0**40
# In float16: elements of factors may be up to √numel times as large as the gradient's.
LARGEST_OF_LOSSY_FP16 = 2.0**8


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Tolerance:
    """The error allowed in an average over W ranks.

    |output − mean| ≤ 2 · W · (relative · magnitude + absolute)

    The magnitude is the largest |gradient| of all ranks. The factor is 2 · W because W addends and their
    partial sums are rounded once each, and none is larger than the magnitude.

    relative: the error of one rounding, as a fraction of the magnitude.
    absolute: the error of one rounding, whatever the magnitude.
    of: where the magnitude is taken: at the same element, or in the whole bucket.
    """

    relative: float
    absolute: float = 0.0
    of: Literal["element", "bucket"] = "element"

    def allowed(self, workload: Workload, step: int, index: int) -> Tensor:
        """Return the error allowed in each element of a tensor's average, in float64."""
        stacked = workload.stacked(step)
        magnitude = stacked[index].abs().amax(0)
        if self.of == "bucket":
            indices = workload.buckets[workload.bucket_of(index)]
            magnitude = torch.full_like(magnitude, workload.largest(step, *indices))
        return 2 * workload.world_size * (self.relative * magnitude + self.absolute)

    @classmethod
    def rounding(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of sums in a dtype. `absolute` is the spacing of its subnormal numbers."""
        u = unit_roundoff(dtype)
        return cls(u, torch.finfo(dtype).smallest_normal * 2 * u)

    @classmethod
    def levels(cls, bits: int) -> Tolerance:
        """Return the tolerance of values rounded to 2^bits levels between a bucket's smallest and largest."""
        return cls(2.0 ** (1 - bits), of="bucket")


@dataclass(frozen=True)
class Claims:
    """A hook's claims, which the properties check. None or False means not claimed.

    tolerance: the tolerance of the averages; None if the hook is lossy.
    precision: the dtype that the hook rounds to, if coarser than the bucket's.
    start: the number of steps of plain averaging before the hook compresses.
    exact_rank: a mean gradient of at most this rank is averaged exactly.
    exact_shapes(shape): True if a lossy hook averages tensors of this shape exactly.
    contraction: δ in ‖M − C(M)‖² ≤ (1 − δ) ‖M‖². With 0, C(M) is no farther from M than zero is.
    error_feedback: errors of a step are added to a later step. A hook that averages may claim it, too: then
        it compensates its own rounding.
    feedback_precision: the coarsest dtype of gradients that enter error feedback, or of kept errors.
    errors_of(state): a rank's errors by bucket index, each flat like its bucket.
    density: the mean fraction of a bucket's elements that a rank sends in a step. The others wait.
    unbiased: the expectation of the output is the mean.
    keeps_zeros: elements that have been 0 on every rank in every step so far are exactly 0 in the average.
        "elements": all such elements. "lines": only those of a row or column that has been 0 throughout, as
        in a product of two factors; plain steps and tensors of exact shapes still keep every element.
    scale_equivariant: multiplying all gradients by 2^k multiplies the outputs by 2^k, "bitwise" or within
        "rounding".
    rank_symmetric: the outputs don't depend on which rank has which gradients.
    bucket_insensitive: the outputs don't depend on the assignment of tensors to buckets.
    max_magnitude: outputs are finite if the ranks' mean |gradient| is at most this at every element.
    checkpoint: "safe" if torch.load's safe default can reload a state; "any" if some way of `reload` can.
    memory: the largest ratio of the bytes of a state's tensors to the bytes of the gradients.
    """

    tolerance: Tolerance | None = None
    precision: torch.dtype = torch.float64
    start: int = 0
    exact_rank: int | None = None
    exact_shapes: Callable[[Shape], bool] | None = None
    contraction: float | None = None
    error_feedback: bool = False
    feedback_precision: torch.dtype = torch.float64
    errors_of: Callable[[Any], Mapping[int, Tensor]] | None = None
    density: float = 1.0
    unbiased: bool = False
    keeps_zeros: Literal["elements", "lines"] | None = None
    scale_equivariant: Literal["bitwise", "rounding"] | None = None
    rank_symmetric: bool = False
    bucket_insensitive: bool = False
    max_magnitude: float = LARGEST_OF_LOSSY
    checkpoint: Literal["safe", "any"] | None = None
    memory: float | None = None

    @property
    def is_lossy(self) -> bool:
        return self.tolerance is None

    def is_exact(self, shape: Shape) -> bool:
        """Return whether a lossy hook averages tensors of this shape exactly."""
        return self.exact_shapes is not None and self.exact_shapes(shape)

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of the bucket's dtype or of `precision`, whichever is coarser."""
        return max(unit_roundoff(dtype), unit_roundoff(self.precision))

    def feedback_roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff that error feedback doesn't compensate in a bucket of this dtype.

        A lossy hook may round to its own precision, too. A hook that averages compensates that rounding.
        """
        rounded = unit_roundoff(dtype) if self.tolerance else self.unit_roundoff(dtype)
        return max(rounded, unit_roundoff(self.feedback_precision))

    def exact(self, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of averages without compression in a bucket of this dtype."""
        return Tolerance.rounding(max(dtype, self.precision, key=unit_roundoff))

    def tolerance_in(self, dtype: torch.dtype) -> Tolerance | None:
        """Return the tolerance of averages in a bucket of this dtype; None if the hook is lossy."""
        if self.tolerance is None or self.tolerance.of == "bucket":
            return self.tolerance
        return max(self.tolerance, self.exact(dtype), key=attrgetter("relative"))

    def underflow(self, workload: Workload, index: int) -> float:
        """Return a bound of the norm of a tensor's errors through underflow; see Tolerance.rounding."""
        absolute = self.exact(workload.dtype).absolute
        return 2 * workload.world_size * absolute * math.sqrt(workload.numel(index))

    def limit(self, dtype: torch.dtype) -> float:
        """Return the largest mean |gradient| for which outputs must be finite in a bucket of this dtype."""
        largest = torch.finfo(dtype).max
        if self.is_lossy and largest < LARGEST_OF_LOSSY:
            largest = LARGEST_OF_LOSSY_FP16
        return min(self.max_magnitude, 0.99 * largest)

    def steps_until_sent(self, numel: int) -> int:
        """Return the number of steps after which each of a bucket's elements has been sent.

        If a rank sends random elements, one of them is left with probability (1 − density)^steps. Hooks that
        send the largest ones, or take turns, need fewer steps.
        """
        return math.ceil(math.log(FALSE_ALARM / max(1, numel)) / math.log1p(-min(self.density, 0.5)))


# The probability that a property with random numbers fails a hook that has it.
FALSE_ALARM = 1e-6
# The steps of the probe, which infers claims. Compression that starts later must be claimed.
PROBED_STEPS = 8
PROBE = Workload(((24, 24), (24,)), steps=PROBED_STEPS, noise=1.0, drift=1.0, seed=7)
LONGEST_START = 16
# A hook of 8 bits counts as one that averages if ‖output − mean‖ / ‖mean‖ is at most this.
AVERAGES_WITHIN = 0.05
_TORCHS_ERRORS: ErrorsOf = attrgetter("error_dict")


def claims_of(
    hook: Hook, make_state: MakeState = None, device: str = "cpu", ranks: Ranks = "simulated"
) -> Claims:
    """Return the claims that a hook's compressor declares, and infer the others from a probe.

    A CompressorState's compressor declares claims; see Compressor.claims. torch's PowerSGDState has those of
    gradcomp's PowerSGD. The probe is eight steps of random gradients, on this device, on two ranks.

    A hook averages if its outputs fit the tolerance of float32, float16, bfloat16 or 8 bits, tried in this
    order. It also averages if a step that fits one of the first three follows a step that doesn't: no
    compressor is exact at times, so the earlier step is an error. Any other hook is lossy, from the first
    step on that isn't exact.

    A hook claims error feedback if its state's floating-point tensors have at least as many elements as the
    probe's matrix: these are taken for errors. A lossy hook then claims contraction, too, unless there are
    twice as many: then its outputs depend on more than gradient + error, for example on a prediction.
    Otherwise it claims to be unbiased, because a biased compressor without error feedback need not converge
    (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).

    Correct a wrong inference with `claims=dataclasses.replace(claims_of(hook, make_state), ...)`.
    Raises ValueError if a state starts to compress after more than 16 steps, RankError if the hook fails.
    """
    state, checkpoint = run_ranks(partial(_state, make_state), 1)[0] if make_state else (None, None)
    name = "start_powerSGD_iter" if hasattr(state, "start_powerSGD_iter") else "start_iter"
    start: int | None = getattr(state, name, None)
    if start is not None and start > LONGEST_START:
        raise ValueError(
            f"{name} is {start}: every example would run that many plain steps first. Test with a state that "
            f"starts earlier, for example {name}=2"
        )
    claims = _inferred(hook, run_hook(hook, make_state, replace(PROBE, device=device), ranks=ranks), start)
    if make_state is None:
        return claims
    # A state may hold wires and scratch buffers, and errors.
    memory = 4.0 if claims.is_lossy or claims.error_feedback else 1.0
    declared, errors_of = _declared(hook, state)
    coarsest = max(claims.precision, declared.get("precision") or torch.float64, key=unit_roundoff)
    found = {"checkpoint": checkpoint, "memory": memory, **declared, "precision": coarsest}
    claims = replace(claims, **found)
    if errors_of is not None and start is not None and (claims.is_lossy or claims.error_feedback):
        found["start"] = declared.get("start", start)
    if claims.is_lossy and coarsest == torch.float16:
        found["max_magnitude"] = LARGEST_OF_LOSSY_FP16
    return replace(claims, **found, errors_of=errors_of if claims.error_feedback else None)


def _state(make_state: Callable[[Any], Any], rank: int, process_group: Any) -> tuple[Any, str | None]:
    """Return a new state and its checkpoint claim: "safe" if it holds, else "any", else None."""
    state = make_state(process_group)
    for checkpoint in ("safe", "any"):
        try:
            reload(state, make_state, process_group, safe=checkpoint == "safe")
            return state, checkpoint
        except CheckpointError:
            pass
    return state, None


def _declared(hook: Hook, state: Any) -> tuple[dict[str, Any], ErrorsOf | None]:
    """Return the claims of gradcomp's or torch's state, and the function that reads its errors, or None."""
    is_square = "batched_powerSGD_hook" in _names(hook)
    if isinstance(state, CompressorState):
        options = replace(state.options, square=True) if is_square else state.options
        return state.claims(options), CompressorState.errors_of_buckets
    if not hasattr(state, "q_memory_dict"):
        return {}, _TORCHS_ERRORS if hasattr(state, "error_dict") else None
    names = [each.name for each in fields(PowerSGDOptions) if hasattr(state, each.name)]  # torch's names, too
    options = PowerSGDOptions(**{name: getattr(state, name) for name in names}, square=is_square)
    # torch's hook squares factors in their own dtype.
    claims = {**PowerSGDCompressor.claims(options), "max_magnitude": LARGEST_OF_LOSSY}
    return claims, _TORCHS_ERRORS


def _inferred(hook: Hook, run: Run, start: int | None) -> Claims:
    """Infer claims from a run of the probe. start: the step in which the state says that it compresses."""
    kept = max(run.state_numels[-1]) // run.workload.numel(0)
    keeps_errors = kept > 0
    wrappers = {"bf16_compress_wrapper": torch.bfloat16, "fp16_compress_wrapper": torch.float16}
    wrapped = next((dtype for name, dtype in wrappers.items() if name in _names(hook)), torch.float64)
    plain = (torch.float32, torch.float16, torch.bfloat16)
    fits = [
        next((dtype for dtype in plain if _fits(run, step, Tolerance.rounding(dtype))), None)
        for step in range(PROBED_STEPS)
    ]
    first_lossy = fits.index(None) if None in fits else PROBED_STEPS
    averages_later = [dtype for dtype in fits[first_lossy:] if dtype]
    start = first_lossy % PROBED_STEPS if start is None else start
    seen = averages_later or [dtype for dtype in fits[: start or None] if dtype]
    precision = max([*seen, wrapped], key=unit_roundoff)
    tolerance = None
    if None not in fits or averages_later:
        start, tolerance = 0, Tolerance.rounding(precision)
    if tolerance is None and _fits_eight_bits(run):
        tolerance = Tolerance.levels(8)
        if keeps_errors:
            # The first rounded step shows the precision. Later a 16-bit hook may feed back an error that is
            # larger than the rounding of a small element.
            start = next(step for step, dtype in enumerate(fits) if dtype != torch.float32)
            precision = fits[start] or precision
    averages = tolerance is not None
    if not averages and precision == torch.float32:
        precision = torch.float64  # in fp32, the probe shows no rounding finer than fp32's
    max_magnitude = LARGEST_OF_LOSSY_FP16 if precision == torch.float16 else LARGEST_OF_LOSSY
    if tolerance is not None and tolerance.of == "element":
        max_magnitude = torch.finfo(precision).max * 0.99
    return Claims(
        tolerance=tolerance,
        precision=precision,
        start=start,
        contraction=0.0 if kept == 1 and not averages else None,
        error_feedback=keeps_errors,
        feedback_precision=wrapped if keeps_errors else torch.float64,
        density=_density(run, start),
        unbiased=not (averages or keeps_errors),
        keeps_zeros="elements",
        scale_equivariant="bitwise" if tolerance == Tolerance.rounding(torch.float32) else "rounding",
        rank_symmetric=averages or keeps_errors,  # without errors, ranks may draw different random numbers
        bucket_insensitive=averages,
        max_magnitude=max_magnitude,
    )


def _fits(run: Run, step: int, tolerance: Tolerance) -> bool:
    """Return whether the averages of a step on rank 0 are within the tolerance."""
    outputs = zip(run.outputs[step][0], run.workload.mean(step), strict=True)
    return all(
        bool(((average.double() - mean).abs() <= tolerance.allowed(run.workload, step, index)).all())
        for index, (average, mean) in enumerate(outputs)
    )


def _fits_eight_bits(run: Run) -> bool:
    """Return whether the averages on rank 0 fit 8 bits in every step, and are near the means in norm."""
    for step, outputs in enumerate(run.outputs):
        means = run.workload.mean(step)
        lost = math.hypot(*(float((o - m).norm()) for o, m in zip(outputs[0], means, strict=True)))
        size = math.hypot(*(float(mean.norm()) for mean in means))
        if lost > AVERAGES_WITHIN * size or not _fits(run, step, Tolerance.levels(8)):
            return False
    return True


def _density(run: Run, start: int) -> float:
    """Return the mean fraction of nonzero averages, divided by W: ranks may send different elements."""
    sent = [float((each.average != 0).double().mean()) for each in run.each_output(start) if not each.index]
    return max(sum(sent) / max(1, len(sent)) / run.workload.world_size, 1e-3)


def _names(hook: Any) -> str:
    """Return the names of a hook and of the hooks that it wraps, in one string."""
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return " ".join([getattr(hook, "__qualname__", ""), *(_names(each) for each in inner if callable(each))])
