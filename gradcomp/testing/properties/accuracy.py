"""Properties of a hook's outputs: their distance from the mean gradient, in each step and on average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from gradcomp.testing.claims import Claims, Tolerance
from gradcomp.testing.properties.subject import (
    PropertyFailure,
    Subject,
    place,
    property_of,
    require_close,
    require_close_in_norm,
    require_finite,
)
from gradcomp.testing.run import Run
from gradcomp.testing.workload import Workload

__all__ = ["Factor"]

# A sum of independent roundings, each as large as allowed, may deviate by this many standard deviations.
DEVIATIONS = 5.0


class Factor:
    """The factor ⟨output, mean⟩ / ‖mean‖² over many tensors: 1 for averages with errors that cancel.

    The factor may differ from 1 by the sum of two terms. One is a rounding of every element, as a hook may
    round towards zero. The other is five standard deviations of a sum of independent errors, each as large as
    allowed. Equal means may have equal errors, so only different means count as independent.

    Tensors may differ by orders of magnitude. So each tensor is divided by the largest error allowed in it.
    """

    def __init__(self) -> None:
        self._means: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._allowed: list[Tensor] = []
        self._roundings: list[Tensor] = []

    def add(self, mean: Tensor, output: Tensor, allowed: Tensor, tolerance: Tolerance) -> None:
        """Add a tensor. allowed: the error that the tolerance allows in each element."""
        chosen = (mean != 0) & (allowed > 0)
        if not chosen.any():
            return
        unit = float(allowed.max())
        means = mean[chosen] / unit
        self._means.append(means)
        self._errors.append(output[chosen].double() / unit - means)
        self._allowed.append(allowed[chosen] / unit)
        self._roundings.append(tolerance.relative * means.abs() + tolerance.absolute / unit)

    def require_one(self) -> None:
        """Raise PropertyFailure if the factor differs from 1 by more than roundings explain."""
        if not self._means:
            return
        means, errors, allowed, roundings = map(
            torch.cat, (self._means, self._errors, self._allowed, self._roundings)
        )
        off, square = float(means @ errors), float(means.square().sum())
        repetitions = len(means) / len(means.abs().unique())
        deviation = math.sqrt(float((means * allowed).square().sum()) * repetitions)
        limit = float(means.abs() @ roundings) + DEVIATIONS * deviation
        if abs(off) > limit:
            raise PropertyFailure(
                f"every element is within its tolerance, but all {len(means)} averages together are "
                f"{1 + off / square:.6g} × the mean; rounding explains {1 - limit / square:.6g} to "
                f"{1 + limit / square:.6g}"
            )


# The error allowed in a gradient of rank r that is recovered from its factors, in unit roundoffs. It is P's
# condition number, up to 1000 for a random projection. In 16 bits less is allowed, as 1000 allows any output.
ROUNDINGS_OF_FACTORS = {
    torch.float64: 2.0**10,
    torch.float32: 2.0**10,
    torch.float16: 2.0**8,
    torch.bfloat16: 2.0**6,
}
# The rounding errors of a step, in unit roundoffs: of M = gradient + error, of the output, of error =
# M − output, and on the wire.
ROUNDINGS_OF_A_STEP = 8


def each_output(workload: Workload, run: Run, first_step: int = 0) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield (step, rank, tensor index, output) for every output from first_step on."""
    for step in range(first_step, workload.num_steps):
        for rank, tensors in enumerate(run.outputs[step]):
            for index, tensor in enumerate(tensors):
                yield step, rank, index, tensor


def norm_of(workload: Workload, step: int, index: int) -> float:
    """Compute the largest ‖gradient‖ of one tensor on any rank."""
    return float(workload.stacked(step)[index].flatten(1).norm(dim=1).max())


def norm_of_bucket(workload: Workload, step: int, indices: tuple[int, ...]) -> float:
    """Compute an upper bound of the largest ‖gradient‖ of a bucket on any rank."""
    return math.hypot(*(norm_of(workload, step, index) for index in indices))


def _unless_averages(claims: Claims) -> str:
    return "lossy" if claims.is_lossy and not (claims.start or claims.exact_shapes) else ""


@property_of(_unless_averages)
def averages(subject: Subject, workload: Workload) -> float | None:
    """Every output is the float64 mean of the ranks' gradients, within rounding.

    |output − mean| ≤ 2 · W · (u · magnitude + s)

    W addends and their partial sums are rounded to the dtype on the wire, with unit roundoff u and subnormal
    spacing s (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). The magnitude is
    the largest |gradient| of the ranks; see Tolerance. A lossy hook is checked in its plain steps, and for
    tensors of its exact shapes.

    Roundings cancel in a large number of elements, but a wrong factor, for example 1.01, doesn't. So all
    averages are also checked together; see `Factor`.

    Returns the largest error / tolerance; None if the hook claims no average of the workload.
    """
    claims = subject.claims
    run = subject.run(workload)
    worst, factor = None, Factor()
    for step, rank, index, output in each_output(workload, run):
        tolerance = claims.tolerance
        is_exact = claims.exact_shapes is not None and claims.exact_shapes(workload.shapes[index])
        if tolerance is None and (step < claims.start or is_exact):
            tolerance = claims.exact(workload.dtype)
        if tolerance is None:
            continue
        if tolerance.of == "element":
            tolerance = max(tolerance, claims.exact(workload.dtype), key=lambda each: each.relative)
        if worst is None:
            require_finite(workload, run)
        where = place(workload, step, rank, index)
        allowed = tolerance.allowed(workload, step, index)
        mean = workload.mean(step)[index]
        with subject.naming_multiples(workload, mean, output):
            ratio = require_close(where, mean, output, allowed, "the float64 mean")
        worst = max(worst or 0.0, ratio)
        if rank == 0:
            factor.add(mean, output, allowed, tolerance)
    factor.require_one()
    return worst


@property_of(lambda claims: "" if claims.keeps_zeros else "mixes elements")
def zero_stays_zero(subject: Subject, workload: Workload) -> None:
    """An element that has been 0 on every rank in every step so far is exactly 0 in the average.

    Otherwise pruned weights come back although their gradients are masked. If claims.keeps_zeros is "lines",
    only rows and columns that have been 0 throughout are checked. In plain steps and in tensors of exact
    shapes, every element is checked.
    """
    claims, run = subject.claims, subject.finite_run(workload)
    zero = [torch.ones(shape, dtype=torch.bool) for shape in workload.shapes]
    for step in range(workload.num_steps):
        zero = [z & (t == 0).all(0) for z, t in zip(zero, workload.stacked(step), strict=True)]
        for index, shape in enumerate(workload.shapes):
            is_exact = step < claims.start or (claims.exact_shapes is not None and claims.exact_shapes(shape))
            kept = zero[index] if claims.keeps_zeros == "elements" or is_exact else _lines(zero[index])
            for rank, outputs in enumerate(run.outputs[step]):
                changed = kept & (outputs[index] != 0)
                if changed.any():
                    raise PropertyFailure(
                        f"{place(workload, step, rank, index)}, element "
                        f"{int(changed.flatten().nonzero()[0])}: expected 0, as its gradient has been 0 "
                        f"on every rank in every step so far; got {outputs[index][changed][0].item():.6g}; "
                        f"{int(changed.sum())} of {int(kept.sum())} such elements are not 0"
                    )


def _lines(zero: Tensor) -> Tensor:
    """Keep only the elements in rows or columns of only zeros; none in a vector."""
    if zero.ndim < 2:
        return torch.zeros_like(zero)
    matrix = zero.flatten(1)
    return (matrix.all(1, keepdim=True) | matrix.all(0)).view(zero.shape)


def unless_lossy(claims: Claims) -> str:
    return "" if claims.is_lossy else "averages"


@property_of(lambda claims: unless_lossy(claims) or ("" if claims.exact_rank else "exact for no rank"))
def exact_up_to_rank(subject: Subject, workload: Workload) -> float:
    """Every compressed step averages a mean gradient of rank at most r exactly.

    ‖output − mean‖_F ≤ c · u · max ‖gradient‖_F

    The hook projects on r random directions, and P = M Q spans the columns of M if rank M ≤ r (Vogels et al.,
    PowerSGD, NeurIPS 2019, section 3). c allows for the condition number of P: 1024, in float16 256, in
    bfloat16 64. The workload's spectra are replaced by low_rank with rank r.

    Returns the largest error / tolerance.
    """
    claims = subject.claims
    assert claims.exact_rank is not None
    workload = replace(
        workload,
        spectra=("low_rank",),
        rank=claims.exact_rank,
        steps=max(workload.steps, claims.start + 1),
        # Gradients are projected on the last step's Q. Entirely new ones may be almost orthogonal to it.
        drift=min(workload.drift, 0.1),
        zero_steps=0,
    )
    run = subject.finite_run(workload)
    coarser = max(workload.dtype, claims.precision, key=lambda dtype: torch.finfo(dtype).eps)
    roundings = ROUNDINGS_OF_FACTORS[coarser] * claims.unit_roundoff(workload.dtype)
    worst = 0.0
    for step, rank, index, output in each_output(workload, run, claims.start):
        mean, where = workload.mean(step)[index], place(workload, step, rank, index)
        allowed = roundings * norm_of(workload, step, index) + underflow(claims, workload, index)
        whose = f"the mean, of rank ≤ {claims.exact_rank},"
        with subject.naming_multiples(workload, mean, output):
            ratio = require_close_in_norm(where, mean, output, allowed, whose)
        worst = max(worst, ratio)
    return worst


def underflow(claims: Claims, workload: Workload, index: int) -> float:
    """Compute the norm of the error allowed in a tensor for underflow; see Tolerance.rounding."""
    absolute = claims.exact(workload.dtype).absolute
    return 2 * workload.world_size * absolute * math.sqrt(math.prod(workload.shapes[index]))


def _unless_contraction(claims: Claims) -> str:
    return unless_lossy(claims) or ("no contraction" if claims.contraction is None else "")


@property_of(_unless_contraction)
def contraction(subject: Subject, workload: Workload) -> float | None:
    """‖M − C(M)‖² ≤ (1 − δ) ‖M‖² for every bucket M, and C(0) = 0.

    Error feedback needs such a δ-contraction (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
    assumption A). All ranks get the same gradients. Then M is the mean and C(M) the output, whether a hook
    compresses every rank's gradient or their sum.

    Every compressed step is checked. With error feedback M is the gradient plus the held-back error; see
    `BucketSteps`. This error is known only if the ranks are symmetric. Otherwise only the first compressed
    step is checked.

    δ is claims.contraction. With 0, an output is no farther from the gradient than zero is. Random
    compressors fulfill that in every step, while a larger δ may be an expectation. The rounding allowed is
    the held-back error's plus 4 u ‖M‖.

    Returns the smallest δ found; None if all gradients are zero.
    """
    claims = subject.claims
    assert claims.contraction is not None
    only_first = claims.error_feedback and not claims.rank_symmetric
    num_steps = claims.start + 1 if only_first else max(workload.steps, claims.start + 1)
    workload = replace(workload, noise=0.0, zero_steps=0, steps=num_steps)
    run = subject.finite_run(workload)
    least, smallest = claims.contraction, None
    for bucket, indices in enumerate(workload.buckets):
        for rank in range(workload.world_size):
            steps = BucketSteps.of(claims, workload, run, indices, rank)
            for step in range(claims.start, num_steps):
                i = step - claims.start
                given = steps.means[i] + (steps.held[i] if claims.error_feedback else 0.0)
                size, lost = float(given.norm()), float((given - steps.outputs[i]).norm())
                allowed = (math.sqrt(1 - least) + 4 * claims.unit_roundoff(workload.dtype)) * size
                if lost > allowed + (steps.rounding[i + 1] if size else 0.0):
                    found = 1 - (lost / size) ** 2 if size else -math.inf
                    summed = steps.means.sum(0), steps.outputs.sum(0)
                    raise PropertyFailure(
                        f"step {step}, rank {rank}, bucket {bucket} with tensors "
                        f"{list(indices)}: expected ‖M − C(M)‖² ≤ (1 − {least:g}) ‖M‖², "
                        f"‖M‖ = {size:.6g}{' with what is held back' * bool(i)}; got "
                        f"‖M − C(M)‖ = {lost:.6g}, δ = {found:.3g}{subject.multiple(workload, *summed)}"
                    )
                if size > steps.rounding[i + 1]:
                    smallest = min(1 - (lost / size) ** 2, 1.0 if smallest is None else smallest)
    return smallest


@dataclass(frozen=True)
class BucketSteps:
    """The means, outputs and held-back errors of a bucket on a rank, from the first compressed step on.

    means: [step, element], the ranks' mean gradients.
    outputs: [step, element], the hook's averages on this rank.
    held: [steps + 1, element]; held[i] is Σ means − Σ outputs before step i, held[-1] after the last step.
        With error feedback it is the mean of the ranks' errors.
    rounding: [steps + 1]; rounding[i] is the rounding error allowed in ‖held[i]‖. Every step adds 8 u times
        the norms of the largest gradient and of the held-back errors before and after the step.
    """

    means: Tensor
    outputs: Tensor
    held: Tensor
    rounding: list[float]

    @classmethod
    def of(
        cls, claims: Claims, workload: Workload, run: Run, indices: tuple[int, ...], rank: int
    ) -> BucketSteps:
        steps = range(claims.start, workload.num_steps)
        means = torch.stack([joined(workload.mean(step), indices) for step in steps])
        outputs = torch.stack([joined(run.outputs[step][rank], indices) for step in steps])
        missing = means - outputs
        held = torch.cat([torch.zeros_like(missing[:1]), missing]).cumsum(0)
        roundings = ROUNDINGS_OF_A_STEP * claims.feedback_roundoff(workload.dtype)
        lost_below = sum(underflow(claims, workload, index) for index in indices)
        rounding = [0.0]
        for step, (before, after) in zip(steps, pairwise(held.norm(dim=1).tolist()), strict=True):
            size = norm_of_bucket(workload, step, indices) + before + after
            rounding.append(rounding[-1] + roundings * size + lost_below)
        return cls(means, outputs, held, rounding)


def joined(tensors: list[Tensor], indices: Iterable[int]) -> Tensor:
    return torch.cat([tensors[index].double().flatten() for index in indices])


# The number of compressed steps that `unbiased` runs.
NUM_STEPS = 512
# The probability that `unbiased` fails an unbiased hook.
FALSE_ALARM = 1e-6


@property_of(lambda claims: "" if claims.unbiased else unless_lossy(claims) or "biased")
def unbiased(subject: Subject, workload: Workload) -> float:
    """The expectation of the output is the mean.

    Two gradients take turns in 512 steps. So a hook that outputs the previous step's average deviates, too.
    Each pair of steps is one draw. Draws are independent if the hook draws new random numbers in every step.

    One half of the draws, chosen at random, yields the direction d of the outputs' deviation from the mean.
    The other half, n draws, yields

        t = mean(⟨output − mean, d⟩) / (their standard deviation / √n)

    The property fails if t is above a quantile of Student's distribution of n − 1 degrees of freedom
    (one-sided; the quantile is approximated by Abramowitz and Stegun 26.7.5). An unbiased hook fails with a
    probability of about 1e-6, as the mean of n such sums is almost normal. A bias within rounding is allowed.
    The property doesn't apply to hooks with error feedback: their steps depend on each other.

    Returns t.
    """
    claims = subject.claims
    workload = replace(workload, drift=1.0, period=2, steps=claims.start + NUM_STEPS, zero_steps=0)
    run = subject.finite_run(workload)
    indices = tuple(range(len(workload.shapes)))
    steps = range(claims.start, workload.steps)
    means = [tensor for step in steps[:2] for tensor in workload.mean(step)]
    mean = joined(means, range(len(means)))
    # Tensors may differ by orders of magnitude: each is divided by its own rms.
    unit = torch.cat([t.square().mean().sqrt().clamp(min=1e-300).expand(t.numel()) for t in means])
    outputs = torch.stack([joined(run.outputs[step][0], indices) for step in steps])
    draws = (outputs.view(NUM_STEPS // 2, -1) - mean) / unit
    shuffled = torch.randperm(len(draws), generator=torch.Generator().manual_seed(0))
    first, second = draws[shuffled].chunk(2)
    direction = first.mean(0)
    sums = second @ (direction / direction.norm().clamp(min=1e-300))
    bias, n = float(sums.mean()), len(sums)
    rounding = 2 * workload.world_size * claims.unit_roundoff(workload.dtype)
    allowed = rounding * float((mean / unit).norm()) + rounding * float(draws.abs().max())
    if abs(bias) <= allowed:
        return 0.0
    t = bias / max(float(sums.std()) / math.sqrt(n), 1e-300)
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    limit = z + (z**3 + z) / (4 * (n - 1))
    if t > limit:
        average = mean + draws.mean(0) * unit
        worst = int(draws.mean(0).abs().argmax())
        step, index, element = _located(workload, worst)
        where = f"the {('first', 'second')[step]} one, {workload.where(index)}, element {element}"
        raise PropertyFailure(
            f"over {NUM_STEPS} steps with two gradients in turn, {where}: expected "
            f"{mean[worst]:.6g} (the float64 mean) on average, got {average[worst]:.6g}; all elements: t = "
            f"{t:.3g}, allowed {limit:.3g}{subject.multiple(workload, mean, average)}"
        )
    return t


def _located(workload: Workload, position: int) -> tuple[int, int, int]:
    """Return (step, tensor index, element) of a position in the joined tensors of two steps."""
    step, left = divmod(position, sum(map(math.prod, workload.shapes)))
    for index, shape in enumerate(workload.shapes):
        if left < math.prod(shape):
            return step, index, left
        left -= math.prod(shape)
    raise IndexError(position)
