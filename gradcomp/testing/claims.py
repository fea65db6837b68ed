"""Claims: a hook's promises. Its compressor declares them; a probe infers the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.compress import CompressorState
from gradcomp.compress.powersgd import PowerSGDOptions
from gradcomp.compress.quantized import QuantizedOptions
from gradcomp.hooks.auto_hook import AutoOptions
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.testing.ranks import RankError, run_ranks
from gradcomp.testing.run import CheckpointError, ErrorsOf, MakeState, Ranks, Run, reload, run_hook
from gradcomp.testing.workload import Shape, Workload, flat

# The squared norm of 2^20 elements this large fits in float32: 2^(2·40+20) < 2^128.
LARGEST_OF_LOSSY = 2.0**40
# In float16: elements of factors may be up to √numel times as large as the gradient's.
LARGEST_OF_LOSSY_FP16 = 2.0**8
# Sums of over a hundred of these fit in float32 and bfloat16.
LARGEST_OF_SUMS = 2.0**120


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Tolerance:
    """The error allowed in an average over W ranks.

    |output − mean| ≤ 2 · W · (relative · magnitude + absolute)

    The magnitude is the largest |gradient| of all ranks. W addends and their partial sums are rounded once
    each, and none is larger than the magnitude.

    relative, absolute: the error of one rounding, as a fraction of the magnitude and whatever it is.
    of: where the magnitude is taken: at the same element, or in the whole bucket.
    """

    relative: float
    absolute: float = 0.0
    of: Literal["element", "bucket"] = "element"

    def allowed(self, workload: Workload, step: int, index: int) -> Tensor:
        """Return the error allowed in each element of a tensor's average, in float64."""
        magnitude = workload.stacked(step)[index].abs().amax(0)
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
    tracks: for a gradient that stays the same, the outputs approach this multiple of the mean; for methods
        whose sums differ from the gradients' sums: EF21 and a decaying error (1), momentum (more than 1).
    density: the mean fraction of a bucket's elements that a rank sends in a step. The others wait.
    unbiased: the expectation of the output is the mean.
    variance: ω of an unbiased hook: E‖output − mean‖² ≤ ω · the ranks' mean ‖gradient‖². By default four
        times the probe's.
    keeps_zeros: elements that have been 0 on every rank in every step so far are exactly 0 in the average.
        "elements": all such elements. "lines": only rows and columns of them, as in a product of two factors.
        Plain steps and tensors of exact shapes keep every element.
    scale_equivariant: multiplying all gradients by 2^k multiplies the outputs by 2^k.
    rank_symmetric: the outputs don't depend on which rank has which gradients.
    bucket_insensitive: the outputs don't depend on the assignment of tensors to buckets.
    shows_nonfinite: inf or NaN on one rank is seen in the outputs on every rank, and not after its step.
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
    tracks: float | None = None
    density: float = 1.0
    unbiased: bool = False
    variance: float | None = None
    keeps_zeros: Literal["elements", "lines"] | None = None
    scale_equivariant: bool = False
    rank_symmetric: bool = False
    bucket_insensitive: bool = False
    shows_nonfinite: bool = True
    max_magnitude: float = LARGEST_OF_LOSSY
    checkpoint: Literal["safe", "any"] | None = None
    memory: float | None = None

    @property
    def is_lossy(self) -> bool:
        return self.tolerance is None

    def is_exact(self, shape: Shape) -> bool:
        """Return whether a lossy hook averages tensors of this shape exactly."""
        return self.exact_shapes is not None and self.exact_shapes(shape)

    def exact(self, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of averages in a bucket's dtype or in `precision`, whichever is coarser."""
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
        if self.is_lossy and torch.float16 in (dtype, self.precision):
            largest = LARGEST_OF_LOSSY_FP16
        return min(self.max_magnitude, 0.99 * largest)

    def steps_until_sent(self, numel: int) -> int:
        """Return the number of steps after which each of a bucket's elements has been sent.

        A random element is left with probability (1 − density)^steps; the largest, or those in turn, sooner.
        """
        return math.ceil(math.log(FALSE_ALARM / max(1, numel)) / math.log1p(-min(self.density, 0.5)))


# The probability that a property with random numbers fails a hook that has it.
FALSE_ALARM = 1e-6
# The steps of the probe, which infers claims. Compression that starts later must be claimed.
PROBED_STEPS = 8
PROBE = Workload(((24, 24), (24,)), steps=PROBED_STEPS, noise=1.0, drift=1.0, masked=0.25, seed=7)
LONGEST_START = 16
# A hook of 8 bits counts as one that averages if ‖output − mean‖ / ‖mean‖ is at most this.
AVERAGES_WITHIN = 0.05
# The last line of an error where there is no GPU, or where a tensor isn't on it.
NEEDS_A_GPU = re.compile(
    r"[\w.]+: .*(not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|0 active drivers|"
    r"same device.*cuda|CUDA tensor|\(cpu tensor\?)"
)
# One rank may have twice the noise of the average over the probe's two ranks. Chance may double it again.
VARIANCE_OF_ONE = 4.0
_TORCHS_ERRORS: ErrorsOf = attrgetter("error_dict")


def claims_of(
    hook: Hook, make_state: MakeState = None, device: str = "cpu", ranks: Ranks = "simulated"
) -> Claims:
    """Return a hook's claims: DECLARED for gradcomp's compressors and torch's PowerSGD, others by a probe.

    The probe is eight steps of random gradients, on this device, on two ranks. docs/testing.md says under
    "What a hook claims" what follows from its outputs and from the floating-point tensors that the state
    keeps. A step that isn't exact, before one that is, is an error of the hook: no compressor is exact at
    times. Any other hook is lossy from the first step on that isn't exact. It claims no contraction if it
    keeps more than its errors: its outputs may depend on more than gradient + error, as on a prediction.

    Correct a wrong inference with `claims=dataclasses.replace(claims_of(hook, make_state), ...)`.
    Raises ValueError if a state starts to compress after more than 16 steps, or if the hook fails for
    want of a GPU; RankError if it fails for another reason.
    """
    probe, run = replace(PROBE, device=device), partial(run_hook, hook, make_state, ranks=ranks)
    try:
        state, checkpoint = run_ranks(partial(_state, make_state), 1)[0] if make_state else (None, None)
        name = "start_powerSGD_iter" if hasattr(state, "start_powerSGD_iter") else "start_iter"
        start: int | None = getattr(state, name, None)
        if start is not None and start > LONGEST_START:
            raise ValueError(
                f"{name} is {start}: every example would run that many plain steps first. Test with a state "
                f"that starts earlier, for example {name}=2"
            )
        unchanged = run(probe)
    except RankError as error:
        *_, last = str(error).splitlines()
        if device == "cpu" and NEEDS_A_GPU.match(last):
            raise ValueError(
                f"the hook fails on CPU tensors: {last}. If it needs a GPU's, use a machine with one, "
                'and device="cuda"'
            ) from error
        raise
    claims = _inferred(hook, unchanged, start)
    if claims.unbiased:
        scaled = run(replace(probe, log2_factor=8))
        one, other = (
            flat(each.average for each in run.each_output(claims.start)) for run in (unchanged, scaled)
        )
        if one.any() and torch.equal(one, other):
            claims = replace(claims, unbiased=False, scale_equivariant=False)
    if make_state is None:
        return claims
    promised, errors_of = declared(hook, state)
    # A state may hold wires and scratch buffers, and errors.
    memory = 4.0 if claims.is_lossy or claims.error_feedback else 1.0
    found = {"checkpoint": checkpoint, "memory": memory, **promised}
    if errors_of is not None and start is not None:
        found.setdefault("start", start)
    found["precision"] = max(claims.precision, promised.get("precision") or torch.float64, key=unit_roundoff)
    claims = replace(claims, **found)
    return replace(claims, errors_of=errors_of if claims.error_feedback else None)


def _state(make_state: Callable[[Any], Any], rank: int, process_group: Any) -> tuple[Any, str | None]:
    """Return a new state and its checkpoint claim: "safe" if it holds, else "any", else None."""
    state = make_state(process_group)
    for checkpoint in ("safe", "any"):
        with suppress(CheckpointError):
            reload(state, make_state, process_group, safe=checkpoint == "safe")
            return state, checkpoint
    return state, None


# ---- what gradcomp's compressors claim


def _of_powersgd(options: PowerSGDOptions) -> dict[str, Any]:
    has_start_bits = options.start_bits is not None
    has_codes = options.is_quantized or has_start_bits
    is_epsilon_free = not options.orthogonalization_epsilon
    has_exact_rank = is_epsilon_free and not (has_codes or options.square)
    # fp64 compresses most: what it averages exactly is averaged exactly in every dtype.
    is_exact = None if options.square or has_start_bits else partial(_is_uncompressed, options)
    return {
        **({"start": 0} if has_start_bits else {}),
        "precision": options.uncompressed_dtype if options.is_quantized else options.factor_dtype,
        "exact_rank": options.matrix_approximation_rank if has_exact_rank else None,
        "exact_shapes": is_exact,
        "contraction": 0.0,
        "error_feedback": options.use_error_feedback,
        "unbiased": False,
        "keeps_zeros": None if options.square else "lines",
        "scale_equivariant": is_epsilon_free,
        "rank_symmetric": not has_codes,
        "max_magnitude": 2.0**100,  # factors must fit in fp32; they are squared in fp64
        "checkpoint": "safe",
        # The error; and factors, wires and fp64 scratch of (n + m) · r elements each, under n · m / 2
        # if min_compression_rate is 2.
        "memory": None if has_start_bits else 6.0,
    }


def _is_uncompressed(options: PowerSGDOptions, shape: Shape) -> bool:
    return not options.layout([shape], torch.float64).matrices


def _of_quantized(options: QuantizedOptions) -> dict[str, Any]:
    # A rank doesn't round its own shard, which 8 bits' tolerance allows for.
    return {"contraction": 0.0, "rank_symmetric": False} if options.bits <= 4 else {}


def _of_auto(options: AutoOptions) -> dict[str, Any]:
    """Return the claims that all candidates have."""
    hooks = list(map(NamedHook.named, options.candidates))
    factors = [_of_powersgd(each.options) for each in hooks if isinstance(each.options, PowerSGDOptions)]
    dtypes = [each["precision"] for each in factors]
    dtypes += [getattr(each.options, "wire_dtype", None) for each in hooks]
    return {
        "tolerance": None,
        "precision": max(filter(None, dtypes), key=unit_roundoff, default=None),
        "contraction": 0.0,
        "error_feedback": True,
        "unbiased": False,
        "keeps_zeros": "lines" if factors else "elements",
        "scale_equivariant": True,
        "rank_symmetric": not any(hook.has_codes for hook in hooks),
        "bucket_insensitive": False,  # random directions differ from bucket to bucket
        "max_magnitude": LARGEST_OF_LOSSY,
        "checkpoint": None,  # after a load a trial begins again
        "memory": None,  # the candidates of a trial need more or less
    }


DECLARED: dict[type, Callable[[Any], dict[str, Any]]] = {
    PowerSGDOptions: _of_powersgd,
    QuantizedOptions: _of_quantized,
    AutoOptions: _of_auto,
}


def declared(hook: Hook, state: Any) -> tuple[dict[str, Any], ErrorsOf | None]:
    """Return the claims of gradcomp's or torch's state, and the function that reads its errors, or None."""
    is_square = "batched_powerSGD_hook" in _names(hook)
    if isinstance(state, CompressorState):
        options = replace(state.options, square=True) if is_square else state.options
        declare = DECLARED.get(type(options))
        return declare(options) if declare else {}, CompressorState.errors_of_buckets
    if not hasattr(state, "q_memory_dict"):
        return {}, _TORCHS_ERRORS if hasattr(state, "error_dict") else None
    names = [each.name for each in fields(PowerSGDOptions) if hasattr(state, each.name)]  # torch's names, too
    options = PowerSGDOptions(**{name: getattr(state, name) for name in names}, square=is_square)
    # torch's hook squares factors in their own dtype.
    return {**_of_powersgd(options), "max_magnitude": LARGEST_OF_LOSSY}, _TORCHS_ERRORS


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
    elif all(_fits(run, step, Tolerance.levels(8)) for step in range(PROBED_STEPS)):
        tolerance = Tolerance.levels(8)
        if keeps_errors:
            # The first rounded step shows the precision. Later a 16-bit hook may feed back an error that is
            # larger than the rounding of a small element.
            start = next(step for step, dtype in enumerate(fits) if dtype != torch.float32)
            precision = fits[start] or precision
    elif precision == torch.float32:
        precision = torch.float64  # in fp32, the probe shows no rounding finer than fp32's
    averages = tolerance is not None
    max_magnitude = LARGEST_OF_LOSSY_FP16 if precision == torch.float16 else LARGEST_OF_LOSSY
    if tolerance is not None and tolerance.of == "element":
        max_magnitude = min(torch.finfo(precision).max * 0.99, LARGEST_OF_SUMS)
    return Claims(
        tolerance=tolerance,
        precision=precision,
        start=start,
        contraction=0.0 if kept == 1 and not averages else None,
        error_feedback=keeps_errors,
        feedback_precision=wrapped if keeps_errors else torch.float64,
        density=_density(run, start),
        unbiased=not (averages or keeps_errors),
        variance=VARIANCE_OF_ONE * _variance(run, start),
        keeps_zeros=_kept_zeros(run, start),
        scale_equivariant=True,
        rank_symmetric=averages or keeps_errors,  # without errors, ranks may draw different random numbers
        bucket_insensitive=averages,
        max_magnitude=max_magnitude,
    )


def _fits(run: Run, step: int, tolerance: Tolerance) -> bool:
    """Return whether rank 0's averages of a step are within the tolerance, and for levels near the means."""
    means, outputs = flat(run.workload.mean(step)), flat(run.outputs[step][0])
    allowed = flat(tolerance.allowed(run.workload, step, index) for index in range(len(run.outputs[step][0])))
    off = outputs - means
    is_near = tolerance.of == "element" or bool(off.norm() <= AVERAGES_WITHIN * means.norm())
    return is_near and bool((off.abs() <= allowed).all())


def _variance(run: Run, start: int) -> float:
    """Return Σ ‖output − mean‖² / Σ ‖gradient‖² over all ranks."""
    lost = flat(each.average - each.mean for each in run.each_output(start))
    given = flat(tensor for step in range(start, PROBED_STEPS) for tensor in run.workload.stacked(step))
    return float(lost.square().sum() / given.square().sum())


def _density(run: Run, start: int) -> float:
    """Return nonzero averages / nonzero means / W: ranks may send different elements."""
    outputs = [each for each in run.each_output(start) if not each.index]
    sent = sum(int(each.average.count_nonzero()) for each in outputs)
    given = sum(int(each.mean.count_nonzero()) for each in outputs)
    return max(sent / given / run.workload.world_size, 1e-3)


def lines(zero: Tensor) -> Tensor:
    """Keep only the elements in rows or columns of only zeros; none in a vector."""
    if zero.ndim < 2:
        return torch.zeros_like(zero)
    matrix = zero.flatten(1)
    return (matrix.all(1, keepdim=True) | matrix.all(0)).view(zero.shape)


def _kept_zeros(run: Run, start: int) -> Literal["elements"] | None:
    """Infer Claims.keeps_zeros: None for factors, and if zeros come out as large as others, as when rotated.

    Factors keep lines up to rounding, which they may claim. What is in between is taken for an error.
    """
    outputs = [each for each in run.each_output(start) if not each.index]
    averages = torch.stack([each.average.double() for each in outputs])
    zero = outputs[0].mean == 0  # in every step
    of_lines, of_zeros, others = (averages[:, each] for each in (lines(zero), zero, ~zero))
    has_factors = of_zeros.any() and of_lines.abs().amax() <= 1e-6 * others.abs().amax()
    return None if has_factors or of_zeros.square().mean() > others.square().mean() / 64 else "elements"


def _names(hook: Any) -> str:
    """Return the names of a hook and of the hooks that it wraps, in one string."""
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return " ".join([getattr(hook, "__qualname__", ""), *(_names(each) for each in inner if callable(each))])
