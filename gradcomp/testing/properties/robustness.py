"""Properties of any hook: all ranks finish, with equal, finite outputs, and nothing else changes them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from hypothesis import strategies as st

from gradcomp.command_line import in_words
from gradcomp.parallel.module import check_hook as check_signature
from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import Output
from gradcomp.testing.workload import Workload

from .subject import (
    NonFiniteFailure,
    PropertyFailure,
    Subject,
    property_of,
    require_close,
    require_close_in_norm,
    require_finite,
    require_same_outputs,
)

# The number of steps that are run after one with inf or NaN.
AFTERWARDS = 2
# Through rounding alone, outputs of a lossy hook may differ by √u times the gradients' norm, half of the
# digits: rounding rotates the span of an ill-conditioned P, though only towards directions of small norm.
HALF_OF_THE_DIGITS = 0.5


@property_of(
    workloads=lambda drawn: drawn.any(rearranged=st.booleans()),
    fraction=2.0,
    listed=lambda drawn: drawn.listed("one", "sixteen"),
    explains=(RankError,),
)
def completes(subject: Subject, workload: Workload) -> None:
    """All ranks finish all steps, with all buckets in flight, whenever collectives complete.

    No rank raises, none waits for ever, and DDP accepts the hook's signature. Process groups match
    collectives by the order in which each rank issues them (PyTorch DDP design note; c10d), which must not
    depend on the time at which a callback runs. There are four schedules of simulated ranks, one on gloo.
    """
    try:
        check_signature(None, subject.hook)
    except (KeyError, ValueError) as error:
        refused = "DDP's register_comm_hook refuses the hook, which must be hook(state, bucket)"
        raise PropertyFailure(f"{refused}: {in_words(error)}") from error
    for schedule in range(4 if subject.ranks == "simulated" else 1):
        try:
            subject.run(workload, schedule=schedule)
        except RankError as error:
            raise PropertyFailure(f"schedule {schedule}: {error}") from error


@property_of(listed=lambda drawn: drawn.listed("four", "five", "long"))
def replicas_identical(subject: Subject, workload: Workload) -> None:
    """Every rank has rank 0's outputs, element by element; otherwise the model's replicas diverge."""
    run = subject.run(workload)
    of_rank_0 = replace(run, outputs=[by_rank[:1] * len(by_rank) for by_rank in run.outputs])
    require_same_outputs(of_rank_0, run, "as on rank 0")


@property_of(measure="up to", explains=(NonFiniteFailure,))
def finite_in_finite_out(subject: Subject, workload: Workload) -> Iterator[float]:
    """Outputs of finite gradients are finite while the ranks' mean |gradient| ≤ claims.max_magnitude.

    The mean, because the dtype on the wire must hold it, but not a single rank's gradient. The workload is
    run unchanged, then for two compressed steps multiplied by the power of two that takes it to the limit.

    Yields the largest mean |gradient| of the second run; nothing for a workload beyond the limit.
    """
    claims = subject.claims
    limit = claims.limit(workload.dtype)
    if _largest(workload) > limit:
        return
    subject.finite_run(workload)
    edge = replace(workload, steps=min(claims.start + 2, workload.steps), zero_steps=0)
    headroom = min(limit / max(_largest(edge), 1e-300), 2.0**1000)
    edge = replace(edge, log2_factor=workload.log2_factor + math.frexp(headroom)[1] - 1)
    while not math.isfinite(_largest(edge)):  # a rank's gradient may be larger than the mean
        edge = replace(edge, log2_factor=edge.log2_factor - 1)
    try:
        subject.finite_run(edge)
    except NonFiniteFailure as error:
        raise NonFiniteFailure(
            f"{error}, with log2_factor={edge.log2_factor}: the ranks' mean |gradient| is at most "
            f"{_largest(edge):.6g} then, of {limit:.6g} claimed"
        ) from None
    yield _largest(edge)


def _largest(workload: Workload) -> float:
    """Compute the largest element of the ranks' mean |gradient| in any step."""
    means = [t.abs().mean(0) for step in range(workload.steps) for t in workload.stacked(step)]
    return max((float(mean.max()) for mean in means if mean.numel()), default=0.0)


@property_of(
    "shows_nonfinite",
    declined="shows_nonfinite=False (after an overflow, GradScalers of some ranks may skip the step, but "
    "not all; or NaN may stay)",
    workloads=lambda drawn: drawn.any(poison=st.sampled_from(drawn.poisons())),
    listed=lambda drawn: drawn.every_poison(),
)
def nonfinite_seen_by_all(subject: Subject, workload: Workload) -> None:
    """An inf or NaN on one rank leads to inf or NaN in its bucket's outputs on every rank, in that step only.

    So torch.amp's GradScaler, which checks every rank's own gradients, skips the step on all ranks or on
    none. Outputs of later steps, and errors in the state, are finite again, unless claims.tracks says that
    the state is a momentum or an estimate. The value is the workload's poison; by default inf on the last
    rank in the first compressed step.
    """
    claims = subject.claims
    poison = workload.poison or (claims.start, workload.world_size - 1, 0, math.inf)
    step, source, index, value = poison
    steps = max(workload.steps, step + 1 + AFTERWARDS)
    workload = replace(workload, poison=None, zero_steps=0, steps=steps)
    subject.finite_run(workload)  # if this raises, the poison is not the cause
    workload = replace(workload, poison=poison)
    try:
        run = subject.run(workload, errors_of=claims.errors_of)
    except RankError as error:
        raise PropertyFailure(f"with {value} in step {step}: {error}") from error
    indices = workload.buckets[workload.bucket_of(index)]
    for rank, outputs in enumerate(run.outputs[step]):
        if all(bool(outputs[n].isfinite().all()) for n in indices):
            raise PropertyFailure(
                f"{Output(workload, step, rank, index, outputs[index])}: expected inf or NaN somewhere "
                f"in its bucket, as rank {source} has {value} there; got finite averages"
            )
    # Not NonFiniteFailures, as the poisoned gradients aren't finite.
    kept = (("", run.outputs), ("errors in the state: ", run.errors))
    for what, tensors in kept if claims.tracks is None else ():
        try:
            require_finite(replace(run, outputs=tensors), step + 1)
        except NonFiniteFailure as error:
            raise PropertyFailure(f"{what}{error} after {poison}") from None


@property_of(workloads=lambda drawn: None, listed=lambda drawn: drawn.listed("groups"))
def stays_in_its_group(subject: Subject, workload: Workload) -> None:
    """In a world of two disjoint groups, the outputs have the bits of a world with one group.

    Collectives must use the group that make_state was given. The second group has the negative gradients.
    """
    run = subject.run(replace(workload, groups=1))
    try:
        other = subject.run(replace(workload, groups=2))
    except RankError as error:
        raise PropertyFailure(f"in one of two groups of {workload.world_size} ranks: {error}") from error
    require_same_outputs(run, other, "in a world of its own; here is a second group")


@property_of(workloads=lambda drawn: None, listed=lambda drawn: drawn.listed("long"))
def random_state_kept(subject: Subject, workload: Workload) -> None:
    """The user's random numbers depend on the user's seed, also after a hook.

    A hook that calls torch.manual_seed or random.seed gives the user's program, such as its dropout, the same
    numbers again. A hook may draw from the global generators. The workload is run with two seeds.
    """
    runs = [subject.run(workload, seed=seed).random_numbers for seed in (0, 1 << 20)]
    for step, rank in product(range(workload.num_steps), range(workload.world_size)):
        for whose, one, other in zip(("torch", "Python"), *(run[step][rank] for run in runs), strict=True):
            if one == other:
                raise PropertyFailure(
                    f"step {step}, rank {rank}: expected {whose}'s global generator to go on from the "
                    f"user's seed; after the hook it draws {one:.6g} whatever the seed was"
                )


@property_of(workloads=lambda drawn: None, listed=lambda drawn: drawn.listed("groups", "many", groups=1))
def same_in_processes(subject: Subject, workload: Workload) -> None:
    """In real processes on gloo, every rank has rank 0's outputs, and they are finite.

    Each process has another PYTHONHASHSEED, so hash(str) and the order of sets differ.
    """
    real = replace(subject, hook=partial(_quietly, subject.hook), ranks="gloo")
    replicas_identical.check(real, workload)
    real.finite_run(workload)


def _quietly(hook: Any, *given: Any) -> Any:
    with redirect_stdout(io.StringIO()):
        return hook(*given)


@property_of()
def deterministic(subject: Subject, workload: Workload) -> None:
    """A second run has the same bits, although its collectives complete at other times.

    On simulated ranks, torch's generator has the same state in both runs.
    """
    require_same_outputs(subject.run(workload), subject.run(workload, schedule=1), "the first run's")


@property_of("scale_equivariant", measure="difference / tolerance ≤")
def scale_equivariant(subject: Subject, workload: Workload) -> Iterator[float]:
    """C(2^k M) = 2^k C(M), for 2^4 and 2^-4; allowed is a difference as in `rank_permutation`."""
    for power in (4, -4):
        yield from _differences(subject, workload, power, log2_factor=workload.log2_factor + power)


@property_of("rank_symmetric", measure="difference / tolerance ≤")
def rank_permutation(subject: Subject, workload: Workload) -> Iterator[float]:
    """The outputs don't depend on which rank has which gradients.

    With the ranks in reverse order the outputs are equal within twice the tolerance of averages. For a lossy
    hook, ‖difference‖ ≤ √u · max(‖gradient‖, ‖output‖) up to its first compressed step: errors grow later.
    """
    order = workload.order or tuple(range(workload.world_size))
    return _differences(subject, workload, order=order[::-1])


@property_of("bucket_insensitive", measure="difference / tolerance ≤")
def bucket_insensitive(subject: Subject, workload: Workload) -> Iterator[float]:
    """The outputs don't depend on the assignment of tensors to buckets: all in one, or each in its own.

    Allowed is a difference as in `rank_permutation`.
    """
    for buckets in ((), tuple((index,) for index in reversed(range(len(workload.shapes))))):
        yield from _differences(subject, workload, buckets=buckets)


def _differences(subject: Subject, workload: Workload, power: int = 0, **change: Any) -> Iterator[float]:
    """Yield difference / allowed difference of runs with and without a change of the workload.

    power: the change multiplies outputs by 2 to this power. For a lossy hook the runs end with the first
    compressed step. Raises PropertyFailure for a value above 1.
    """
    claims = subject.claims
    if claims.is_lossy:
        workload = replace(workload, steps=claims.start + 1, zero_steps=0)
    run, other = subject.finite_run(workload), subject.finite_run(replace(workload, **change))
    whose = f"the output without the factor 2^{power}" if power else f"the output of {workload}"
    underflows = 2.0 ** max(0, -power)
    in_one = replace(workload, buckets=())  # a tolerance of a bucket depends on the buckets
    if (tolerance := claims.tolerance_in(workload.dtype)) is not None:
        tolerance = replace(tolerance, absolute=tolerance.absolute * underflows)
    for expected, output in zip(run.each_output(), other.each_output(), strict=True):
        step, index, got = output.step, output.index, output.average.double() * 2.0**-power
        if tolerance is not None:
            allowed = 2 * tolerance.allowed(in_one, step, index)
            yield require_close(output, expected.average, got, allowed, whose)
        else:
            half = claims.exact(workload.dtype).relative ** HALF_OF_THE_DIGITS
            size = max(workload.norm(step, index), float(expected.average.double().norm()))
            limit = half * size + 2 * underflows * claims.underflow(workload, index)
            yield require_close_in_norm(output, expected.average, got, limit, whose)
