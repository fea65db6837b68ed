"""Properties of a hook's outputs: their distance from the mean gradient, in each step and on average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.testing.claims import FALSE_ALARM, PROBE, Claims, lines, unit_roundoff
from gradcomp.testing.run import Run
from gradcomp.testing.workload import Workload, flat

from .subject import PropertyFailure, Subject, property_of, require_close, require_close_in_norm

# The error allowed in a gradient of rank r that is recovered from its factors, in unit roundoffs: P's
# condition number. For a random projection it is above t with a probability of 2 r / t (Edelman, Eigenvalues
# and Condition Numbers of Random Matrices, 1988). A coarser dtype may have less: 1000 would allow any output.
ROUNDINGS_OF_FACTORS = {
    torch.float64: 2.0**20,
    torch.float32: 2.0**10,
    torch.float16: 2.0**8,
    torch.bfloat16: 2.0**6,
}
# The rounding errors of a step, in unit roundoffs: of M = gradient + error, of the output, of error =
# M − output, and on the wire.
ROUNDINGS_OF_A_STEP = 8


@property_of(
    unclaimed=lambda claims: "lossy" if claims.is_lossy and not (claims.start or claims.exact_shapes) else "",
    listed=lambda drawn: drawn.listed("ties", "four", "five", "various", "long", "sixteen", "bf16"),
    measure="error / tolerance ≤",
)
def averages(subject: Subject, workload: Workload) -> Iterator[float]:
    """Every output is the float64 mean of the ranks' gradients, within rounding.

    |output − mean| ≤ 2 · W · (u · magnitude + s)

    W addends and their partial sums are rounded to the dtype on the wire, with unit roundoff u and subnormal
    spacing s (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). The magnitude is
    the largest |gradient| of the ranks; see Tolerance. A lossy hook is checked in its plain steps, and for
    tensors of its exact shapes. All averages are also checked together, as a wrong factor, for example 1.01,
    doesn't cancel as roundings do.

    Yields error / tolerance; nothing if the hook claims no average of the workload.
    """
    claims, run = subject.claims, subject.finite_run(workload)
    of_rank_0 = []
    for output in run.each_output():
        tolerance = claims.tolerance_in(workload.dtype)
        if tolerance is None:
            if output.step >= claims.start and not claims.is_exact(output.average.shape):
                continue
            tolerance = claims.exact(workload.dtype)
        allowed = tolerance.allowed(workload, output.step, output.index)
        yield require_close(output, output.mean, output.average, allowed, "the float64 mean")
        chosen = (output.mean != 0) & (allowed > 0)
        if output.rank == 0 and chosen.any():
            unit = float(allowed.max())  # as tensors may differ by orders of magnitude
            means = output.mean[chosen] / unit
            errors = output.average[chosen].double() / unit - means
            roundings = tolerance.relative * means.abs() + tolerance.absolute / unit
            of_rank_0.append((means, errors, allowed[chosen] / unit, roundings))
    if of_rank_0:
        _require_factor_one(*map(torch.cat, zip(*of_rank_0, strict=True)))


def _require_factor_one(means: Tensor, errors: Tensor, allowed: Tensor, roundings: Tensor) -> None:
    """Raise PropertyFailure if ⟨mean + error, mean⟩ / ‖mean‖² differs from 1 beyond rounding.

    Allowed are a rounding of every element, as a hook may round towards zero, plus five standard deviations
    of a sum of independent errors, each as large as allowed. Equal means count once: errors may be equal.
    """
    off, square = float(means @ errors), float(means.square().sum())
    repetitions = len(means) / len(means.abs().unique())
    deviation = math.sqrt(float((means * allowed).square().sum()) * repetitions)
    limit = float(means.abs() @ roundings) + 5 * deviation
    if abs(off) > limit:
        raise PropertyFailure(
            f"every element is within its tolerance, but all {len(means)} averages together are "
            f"{1 + off / square:.6g} × the mean; rounding explains {1 - limit / square:.6g} to "
            f"{1 + limit / square:.6g}"
        )


@property_of(
    "keeps_zeros",
    workloads=lambda drawn: drawn.any(masked=0.5),
    listed=lambda drawn: drawn.listed("various", "long", masked=0.5),
)
def zero_stays_zero(subject: Subject, workload: Workload) -> None:
    """An element that has been 0 on every rank in every step so far is exactly 0 in the average.

    Otherwise pruned weights come back although their gradients are masked. If claims.keeps_zeros is "lines",
    only rows and columns of zeros are checked outside of plain steps and exact shapes.
    """
    claims, run = subject.claims, subject.finite_run(workload)
    zero = [torch.ones(shape, dtype=torch.bool, device="cpu") for shape in workload.shapes]
    for output in run.each_output():
        step, index, average = output.step, output.index, output.average
        if output.rank == 0:
            zero[index] &= (workload.stacked(step)[index] == 0).all(0)
        only_lines = claims.keeps_zeros == "lines" and step >= claims.start
        kept = lines(zero[index]) if only_lines and not claims.is_exact(average.shape) else zero[index]
        changed = kept & (average != 0)
        if changed.any():
            raise PropertyFailure(
                f"{output}, element {int(changed.flatten().nonzero()[0])}: expected 0, as its gradient has "
                f"been 0 on every rank in every step so far; got {average[changed][0].item():.6g}; "
                f"{int(changed.sum())} of {int(kept.sum())} such elements are not 0"
            )


@property_of(
    "exact_rank", listed=lambda drawn: [*drawn.odd(), *drawn.listed("various")], measure="error / tolerance ≤"
)
def exact_up_to_rank(subject: Subject, workload: Workload) -> Iterator[float]:
    """Every compressed step averages a mean gradient of rank at most r exactly.

    ‖output − mean‖_F ≤ c · u · max ‖gradient‖_F

    P = M Q spans the columns of M if rank M ≤ r (Vogels et al., PowerSGD, NeurIPS 2019, section 3). c allows
    for P's condition number; see ROUNDINGS_OF_FACTORS. The spectra are replaced by low_rank with rank r.
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
    coarser = max(workload.dtype, claims.precision, key=unit_roundoff)
    roundings = ROUNDINGS_OF_FACTORS[coarser] * unit_roundoff(coarser)
    for output in run.each_output(claims.start):
        allowed = roundings * workload.norm(output.step, output.index)
        allowed += claims.underflow(workload, output.index)
        whose = f"the mean, of rank ≤ {claims.exact_rank},"
        yield require_close_in_norm(output, output.mean, output.average, allowed, whose)


@property_of(
    "contraction",
    listed=lambda drawn: [*drawn.odd(), *drawn.listed("various", "long", "bf16")],
    measure="δ ≥",
    worst=min,
)
def contraction(subject: Subject, workload: Workload) -> Iterator[float]:
    """‖M − C(M)‖² ≤ (1 − δ) ‖M‖² for every bucket M, and C(0) = 0.

    Error feedback needs such a δ-contraction (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019,
    assumption A). All ranks get the same gradients: M is the mean and C(M) the output, whether a hook
    compresses every rank's gradient or their sum. With error feedback M includes the held-back error, which
    is known for symmetric ranks only: for others the first compressed step is checked.

    δ is claims.contraction: 0 holds in every step of random compressors, too, while more may be an
    expectation. The rounding allowed is the held-back error's plus 4 u ‖M‖.

    Yields the δ found; nothing for zero gradients.
    """
    claims = subject.claims
    assert claims.contraction is not None
    only_first = claims.error_feedback and not claims.rank_symmetric
    num_steps = max(claims.start + 1, 0 if only_first else workload.steps)
    workload = replace(workload, noise=0.0, zero_steps=0, steps=num_steps)
    run = subject.finite_run(workload)
    least = claims.contraction
    for bucket in BucketSteps.each(claims, run):
        for i, step in enumerate(range(claims.start, num_steps)):
            given = bucket.means[i] + (bucket.held[i] if claims.error_feedback else 0.0)
            size, lost = float(given.norm()), float((given - bucket.outputs[i]).norm())
            allowed = (math.sqrt(1 - least) + 4 * claims.exact(workload.dtype).relative) * size
            rounding = bucket.rounding[i + 1] * math.sqrt(given.numel())
            if lost > allowed + (rounding if size else 0.0):
                found = 1 - (lost / size) ** 2 if size else -math.inf
                raise PropertyFailure(
                    f"got {found:.3g}: step {step}, {bucket.name}: expected ‖M − C(M)‖² ≤ (1 − {least:g}) "
                    f"‖M‖², ‖M‖ = {size:.6g}{' with what is held back' * bool(i)}, "
                    f"‖M − C(M)‖ = {lost:.6g}"
                )
            if size > rounding:
                yield min(1 - (lost / size) ** 2, 1.0)


@dataclass(frozen=True)
class BucketSteps:
    """The means, outputs and held-back errors of a bucket on a rank, from the first compressed step on.

    name: rank, bucket and tensors, for messages.
    means, outputs: [step, element], the ranks' mean gradients, and the hook's averages on this rank.
    held: [steps + 1, element]; held[i] is Σ means − Σ outputs before step i: the mean of the ranks' errors.
    rounding: [steps + 1], the rounding error allowed at an element of held. Every step adds 8 u times the
        largest elements of the gradients and of the held-back errors before and after the step.
    """

    name: str
    means: Tensor
    outputs: Tensor
    held: Tensor
    rounding: list[float]

    @classmethod
    def each(cls, claims: Claims, run: Run) -> Iterator[BucketSteps]:
        """Yield the steps of each bucket on each rank."""
        workload = run.workload
        steps = range(claims.start, workload.num_steps)
        # A hook that averages compensates the rounding to its own precision, a lossy one may not.
        lost_in = claims.precision if claims.is_lossy else workload.dtype
        dtypes = (workload.dtype, claims.feedback_precision, lost_in)
        roundings = ROUNDINGS_OF_A_STEP * max(map(unit_roundoff, dtypes))
        lost_below = 2 * workload.world_size * claims.exact(workload.dtype).absolute
        for bucket, indices in enumerate(workload.buckets):
            means = torch.stack([flat(workload.mean(step)[index] for index in indices) for step in steps])
            sizes = means.new_tensor([workload.largest(step, *indices) for step in steps])
            for rank in range(workload.world_size):
                outputs = torch.stack([flat(run.outputs[step][rank][i] for i in indices) for step in steps])
                missing = means - outputs
                held = torch.cat([torch.zeros_like(missing[:1]), missing]).cumsum(0)
                largest = held.abs().amax(1) if held.shape[1] else held.new_zeros(len(held))
                lost = roundings * (sizes + largest[:-1] + largest[1:]) + lost_below
                rounding = [0.0, *lost.cumsum(0).tolist()]
                name = f"rank {rank}, bucket {bucket} with tensors {list(indices)}"
                yield cls(name, means, outputs, held, rounding)


# The most compressed steps that `unbiased` runs, its calls of the hook, and their elements; 8 steps always.
NUM_STEPS, NUM_CALLS, NUM_ELEMENTS = 512, 1024, 1 << 22


@property_of(
    "unbiased",
    workloads=lambda drawn: drawn.any(max_numel=64, num_tensors=(1, 2), noise=st.sampled_from((0.1, 1.0))),
    listed=lambda drawn: drawn.listed("probed", "ties", "four", "five", "long", "large", "sixteen", "bf16"),
    fraction=0.3,
    measure="t ≤",
)
def unbiased(subject: Subject, workload: Workload) -> Iterator[float]:
    """The expectation of the output is the mean.

    Two gradients take turns in 512 steps, or as few as 8 if the workload is large: a hook that outputs the
    previous step's average deviates, too. Each pair of steps is a draw, independent if the hook draws new
    random numbers in every step. One half of the draws, chosen at random, yields the direction d of the
    outputs' deviation from the mean. The other half, n draws, yields

        t = mean(⟨output − mean, d⟩) / (their standard deviation / √n)

    The property fails if t is above a quantile of Student's distribution of n − 1 degrees of freedom: an
    unbiased hook with a probability of about 1e-6. A bias within rounding is allowed.
    """
    claims = subject.claims
    workload, means, outputs = _in_turn(subject, replace(workload, drift=1.0))
    num_pairs, mean = len(outputs), flat(means)
    # Tensors may differ by orders of magnitude: each is divided by its own rms.
    unit = torch.cat([t.square().mean().sqrt().clamp(min=1e-300).expand(t.numel()) for t in means])
    draws = (outputs - mean) / unit
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(num_pairs, generator=generator, dtype=torch.int64, device="cpu")
    first, second = draws[shuffled].chunk(2)
    direction = first.mean(0)
    sums = second @ (direction / direction.norm().clamp(min=1e-300))
    bias, n = float(sums.mean()), len(sums)
    rounding = 2 * workload.world_size * claims.exact(workload.dtype).relative
    allowed = rounding * float((mean / unit).norm()) + rounding * float(draws.abs().max())
    if abs(bias) <= allowed:
        yield 0.0
        return
    t = bias / max(float(sums.std()) / math.sqrt(n), 1e-300)
    limit = _most_by_chance(n)
    if t > limit:
        average = mean + draws.mean(0) * unit
        worst = int(draws.mean(0).abs().argmax())
        turn, element = divmod(worst, len(mean) // 2)
        owners = [index for index, shape in enumerate(workload.shapes) for _ in range(math.prod(shape))]
        where = f"{workload.where(owners[element])}, element {element - owners.index(owners[element])}"
        raise PropertyFailure(
            f"over {2 * num_pairs} steps with two gradients in turn, the {('first', 'second')[turn]} one, "
            f"{where}: expected "
            f"{mean[worst]:.6g} (the float64 mean) on average, got {average[worst]:.6g}; all elements: t = "
            f"{t:.3g}, allowed {limit:.3g}"
        )
    yield t


def _in_turn(subject: Subject, workload: Workload) -> tuple[Workload, list[Tensor], Tensor]:
    """Run the hook on two gradients in turn, which are equal if the workload's drift is 0.

    Returns the workload, the two gradients' means, tensor by tensor, and rank 0's outputs of each pair of
    compressed steps: [pairs, elements of both gradients] in float64.
    """
    start, numel = subject.claims.start, workload.numel(*range(len(workload.shapes)))
    calls_of_a_step = workload.world_size * len(workload.buckets)
    num_steps = max(8, min(NUM_STEPS, NUM_CALLS // calls_of_a_step, NUM_ELEMENTS // numel) // 4 * 4)
    workload = replace(workload, period=2, steps=start + num_steps, zero_steps=0)
    run = subject.finite_run(workload)
    means = [tensor for step in (start, start + 1) for tensor in workload.mean(step)]
    outputs = torch.stack([flat(by_rank[0]) for by_rank in run.outputs[start:]])
    return workload, means, outputs.view(num_steps // 2, -1)


def _most_by_chance(num_draws: int) -> float:
    """Return Student's quantile at 1 − FALSE_ALARM, by Abramowitz and Stegun 26.7.5."""
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    return z + (z**3 + z) / (4 * (num_draws - 1))


# The most of the noise that may be common to all elements, or to a step and the next one; and the number of
# elements from which this is checked: noise of few elements has few directions.
SHARED_NOISE, LEAST_ELEMENTS = 0.5, 64


@property_of(
    "variance",
    unclaimed=lambda claims: "" if claims.unbiased else "unbiased is False",
    workloads=lambda drawn: None,
    listed=lambda drawn: [
        *drawn.listed("probed", masked=PROBE.masked, noise=0.1),  # ω may depend on the gradients
        *drawn.listed("probed", masked=PROBE.masked, world=2),
    ],
    measure="ω ≤",
)
def variance(subject: Subject, workload: Workload) -> Iterator[float]:
    """E‖output − mean‖² ≤ ω · the ranks' mean ‖gradient‖², and elements and steps have noise of their own.

    ω is claims.variance (Alistarh et al., QSGD, NeurIPS 2017, lemma 3.1). There are as many steps as in
    `unbiased`, with one gradient; the mean over them may be above ω by chance with a probability of 1e-6.

    Noise that all elements share, as of one coin for a whole tensor, has the variance of independent noise,
    but moves all weights together: at most half of Σ‖noise‖² may be in one direction. And the noise of
    an element in one step may have a correlation of at most a half, on average over the elements, with its
    noise in the next step; a negative one cancels noise. Both are checked from 64 elements on.
    """
    claimed = subject.claims.variance
    assert claimed is not None
    workload, means, outputs = _in_turn(subject, replace(workload, drift=0.0))
    start, num_pairs = subject.claims.start, len(outputs)
    size = sum(t.square().sum() for i in (0, 1) for t in workload.stacked(start + i)) / workload.world_size
    found = (outputs - flat(means)).square().sum(1) / float(size)
    by_chance = _most_by_chance(num_pairs) * float(found.std()) / math.sqrt(num_pairs)
    over = f"over {2 * num_pairs} steps with the same gradient"
    if found.mean() > claimed + by_chance:
        raise PropertyFailure(f"got ω = {found.mean():.3g} {over}; chance explains {by_chance:.2g} more")
    one, other = (outputs - outputs.mean(0)).chunk(2, dim=1)
    norms = one.norm(dim=0) * other.norm(dim=0)
    shared = {
        "all elements": torch.linalg.matrix_norm(one, 2) ** 2 / one.square().sum(),
        "a step and the next one": ((one * other).sum(0) / norms.clamp(min=1e-300)).mean(),
    }
    for whose, share in shared.items() if one.shape[1] >= LEAST_ELEMENTS else ():
        if share > SHARED_NOISE and found.mean() > subject.claims.exact(workload.dtype).relative:
            raise PropertyFailure(
                f"{over}: {whose} share {share:.0%} of the noise, at most {SHARED_NOISE:.0%} expected: "
                "each element needs random numbers of its own in every step"
            )
    yield float(found.mean())
