"""Properties that compare two runs of a hook: their outputs are equal, or multiples of each other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gradcomp.testing.claims import Claims
from gradcomp.testing.properties.accuracy import each_output, norm_of, underflow
from gradcomp.testing.properties.subject import (
    Subject,
    place,
    property_of,
    require_close,
    require_close_in_norm,
    require_same,
)
from gradcomp.testing.workload import Workload

# Through rounding alone, outputs of a lossy hook may differ by √u times the gradients' norm, half of the
# digits: rounding rotates the span of an ill-conditioned P, though only towards directions of small norm.
HALF_OF_THE_DIGITS = 0.5


@property_of()
def deterministic(subject: Subject, workload: Workload) -> None:
    """A second run has the same bits, although its collectives complete at other times.

    On simulated ranks, torch's generator has the same state in both runs.
    """
    run = subject.run(workload)
    again = subject.run(workload, schedule=1)
    for step, rank, index, output in each_output(workload, again):
        where = place(workload, step, rank, index)
        require_same(where, run.outputs[step][rank][index], output, "the first run's")


@property_of(lambda claims: "" if claims.scale_equivariant else "not equivariant")
def scale_equivariant(subject: Subject, workload: Workload) -> float:
    """Multiplying gradients by a power of two multiplies the outputs by it.

    C(2^k M) = 2^k C(M), for 2^4 and 2^-4. If claims.scale_equivariant is "bitwise", both sides have the same
    bits, like floating-point sums without overflow and underflow. Otherwise they are equal within twice the
    tolerance of averages; for a lossy hook, ‖difference‖ ≤ √u · max ‖gradient‖.

    Returns the largest difference / allowed difference.
    """
    claims, run = subject.claims, subject.finite_run(workload)
    worst = 0.0
    for power in (4, -4):
        scaled = replace(workload, log2_factor=workload.log2_factor + power)
        outputs = subject.finite_run(scaled)
        for step, rank, index, output in each_output(workload, outputs):
            back = output.double() * 2.0**-power
            expected = run.outputs[step][rank][index].double()
            whose = f"the output without the factor 2^{power}"
            if claims.scale_equivariant == "bitwise":
                require_same(place(workload, step, rank, index), expected, back, whose)
            else:
                output_of = (claims, workload, step, rank, index)
                underflows = 2.0 ** max(0, -power)
                worst = max(worst, _difference(*output_of, expected, back, whose, underflows))
    return worst


@property_of(lambda claims: "" if claims.rank_symmetric else "not symmetric")
def rank_permutation(subject: Subject, workload: Workload) -> float:
    """The outputs don't depend on which rank has which gradients.

    With the ranks in reverse order the outputs are equal within twice the tolerance of averages, as the sums
    have another order. For a lossy hook, ‖difference‖ ≤ √u · max ‖gradient‖, and the steps after the first
    compressed one are not compared: rounding errors grow in them, as in any iteration.

    Returns the largest difference / allowed difference.
    """
    order = workload.order or tuple(range(workload.world_size))
    permuted = replace(_until_compressed(workload, subject.claims), order=order[::-1])
    return _same_outcome(subject, workload, permuted)


@property_of(lambda claims: "" if claims.bucket_insensitive else "depends on buckets")
def bucket_insensitive(subject: Subject, workload: Workload) -> float:
    """The outputs don't depend on the assignment of tensors to buckets.

    With all tensors in one bucket, or each in its own, the outputs are equal within twice the tolerance of
    averages. For a lossy hook, ‖difference‖ ≤ √u · max ‖gradient‖, up to its first compressed step.

    Returns the largest difference / allowed difference.
    """
    indices = range(len(workload.shapes))
    worst = 0.0
    for buckets in ((tuple(indices),), tuple((index,) for index in reversed(indices))):
        other = replace(_until_compressed(workload, subject.claims), buckets=buckets)
        worst = max(worst, _same_outcome(subject, workload, other))
    return worst


def _until_compressed(workload: Workload, claims: Claims) -> Workload:
    return replace(workload, steps=claims.start + 1, zero_steps=0) if claims.is_lossy else workload


def _same_outcome(subject: Subject, workload: Workload, other: Workload) -> float:
    """Compute the largest difference / allowed difference of two runs that should have equal outputs."""
    workload = replace(workload, steps=other.steps, zero_steps=other.zero_steps)
    run, outputs = subject.finite_run(workload), subject.finite_run(other)
    worst = 0.0
    whose = f"the output of {workload}"
    for step, rank, index, output in each_output(other, outputs):
        expected = run.outputs[step][rank][index]
        difference = _difference(subject.claims, other, step, rank, index, expected, output, whose)
        worst = max(worst, difference)
    return worst


def _difference(
    claims: Claims,
    workload: Workload,
    step: int,
    rank: int,
    index: int,
    expected: Tensor,
    got: Tensor,
    whose: str,
    underflows: float = 1.0,
) -> float:
    """Compute the difference / allowed difference of two outputs that should be equal.

    underflows: multiplies the tolerance's absolute part.

    Raises PropertyFailure if the result is above 1.
    """
    where = place(workload, step, rank, index)
    if claims.tolerance is not None:
        tolerance = claims.tolerance
        if tolerance.of == "element":
            tolerance = max(tolerance, claims.exact(workload.dtype), key=lambda each: each.relative)
        else:  # the largest element of a bucket depends on the buckets
            workload = replace(workload, buckets=())
        tolerance = replace(tolerance, absolute=tolerance.absolute * underflows)
        allowed = 2 * tolerance.allowed(workload, step, index)
        return require_close(where, expected, got, allowed, whose)
    half = claims.unit_roundoff(workload.dtype) ** HALF_OF_THE_DIGITS
    allowed_norm = half * norm_of(workload, step, index) + 2 * underflows * underflow(claims, workload, index)
    return require_close_in_norm(where, expected, got, allowed_norm, whose)
