"""Properties of all ranks together: they finish with identical and finite outputs, also after inf or NaN."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import Hook
from gradcomp.testing.properties.accuracy import each_output
from gradcomp.testing.properties.subject import (
    NonFiniteFailure,
    PropertyFailure,
    Subject,
    place,
    property_of,
    require_finite,
    require_same,
)
from gradcomp.testing.ranks import RankError
from gradcomp.testing.workload import Poison, Workload

SCHEDULES = (0, 1, 2, 3)
# The number of steps that are run after one with inf or NaN.
AFTERWARDS = 2


@property_of()
def completes(subject: Subject, workload: Workload) -> None:
    """All ranks finish all steps, with all buckets in flight, whenever collectives complete.

    No rank raises, no two ranks issue collectives in different orders, and none waits for ever. DDP accepts
    the hook's signature.

    Process groups match collectives only by the order in which each rank issues them (PyTorch DDP design
    note; c10d). So this order must not depend on the time at which a callback runs. The property runs four
    schedules of simulated ranks, or once on gloo.
    """
    if refused := _refused_signature(subject.hook):
        raise PropertyFailure(f"DDP's register_comm_hook refuses the hook: {refused}")
    for schedule in SCHEDULES if subject.ranks == "simulated" else SCHEDULES[:1]:
        try:
            subject.run(workload, schedule=schedule)
        except RankError as error:
            raise PropertyFailure(f"schedule {schedule}: {error}") from error


def _refused_signature(hook: Hook) -> str:
    """Return the reason why torch's DDP refuses a hook's signature, or "" if it doesn't."""
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        return f"its second parameter must be called bucket; its signature is {signature}"
    expected = {
        "its bucket's annotation": (signature.parameters["bucket"].annotation, dist.GradBucket),
        "its result's annotation": (signature.return_annotation, torch.futures.Future[torch.Tensor]),
    }
    for what, (annotation, type_) in expected.items():
        if annotation not in (inspect.Signature.empty, type_):
            # `from __future__ import annotations` turns an annotation into a string.
            return f"{what} is {annotation!r}, but must be {type_} or left out"
    return ""


@property_of()
def replicas_identical(subject: Subject, workload: Workload) -> None:
    """Every rank has rank 0's outputs, element by element; otherwise the model's replicas diverge."""
    run = subject.run(workload)
    for step, rank, index, output in each_output(workload, run):
        where = place(workload, step, rank, index)
        require_same(where, run.outputs[step][0][index], output, "as on rank 0")


@property_of()
def finite_in_finite_out(subject: Subject, workload: Workload) -> float | None:
    """Outputs of finite gradients are finite while the ranks' mean |gradient| ≤ claims.max_magnitude.

    The limit is for the mean because the dtype on the wire must hold the mean, but not a single rank's
    gradient. Zero gradients are included. The workload is run unchanged. Then it is run for two compressed
    steps, multiplied by the power of two that takes it to the limit.

    Returns the largest mean |gradient| of the second run; None for a workload beyond the limit.
    """
    claims = subject.claims
    limit = claims.limit(workload.dtype)
    if _largest(workload) > limit:
        return None
    subject.finite_run(workload)
    edge = replace(workload, steps=min(claims.start + 2, workload.steps), zero_steps=0)
    headroom = min(limit / max(_largest(edge), 1e-300), 2.0**1000)
    edge = replace(edge, log2_factor=workload.log2_factor + math.frexp(headroom)[1] - 1)
    while not _is_finite(edge):  # a rank's gradient may be larger than the mean
        edge = replace(edge, log2_factor=edge.log2_factor - 1)
    try:
        subject.finite_run(edge)
    except NonFiniteFailure as error:
        raise NonFiniteFailure(
            f"{error}, with log2_factor={edge.log2_factor}: the ranks' mean |gradient| is at most "
            f"{_largest(edge):.6g} then, of {limit:.6g} claimed"
        ) from None
    return _largest(edge)


def _is_finite(workload: Workload) -> bool:
    return all(bool(t.isfinite().all()) for step in range(workload.steps) for t in workload.stacked(step))


def _largest(workload: Workload) -> float:
    """Compute the largest element of the ranks' mean |gradient| in any step."""
    means = [t.abs().mean(0) for step in range(workload.steps) for t in workload.stacked(step)]
    return max((float(mean.max()) for mean in means if mean.numel()), default=0.0)


@property_of()
def nonfinite_seen_by_all(subject: Subject, workload: Workload) -> None:
    """An inf or NaN on one rank leads to inf or NaN in its bucket's outputs on every rank, in that step only.

    So torch.amp's GradScaler, which checks every rank's own gradients, skips the step on all ranks or on
    none. Outputs of later steps, and errors in the state, are finite again.

    The value is the workload's poison; by default inf in the middle of the last rank's first tensor, in the
    first compressed step.
    """
    claims = subject.claims
    poison = workload.poison or (claims.start, workload.world_size - 1, 0, math.inf)
    steps = max(workload.steps, poison[0] + 1 + AFTERWARDS)
    poisoned = replace(workload, poison=poison, zero_steps=0, steps=steps)
    try:
        _require_seen_and_gone(subject, poisoned, poison)
    except PropertyFailure:
        sound = replace(poisoned, poison=None)
        # If this raises, the poison is not the cause.
        subject.finite_run(sound)
        raise


def _require_seen_and_gone(subject: Subject, workload: Workload, poison: Poison) -> None:
    step, source, index, value = poison
    try:
        run = subject.run(workload, errors_of=subject.claims.errors_of)
    except RankError as error:
        raise PropertyFailure(f"with {value} in step {step}: {error}") from error
    indices = workload.buckets[workload.bucket_of(index)]
    for rank, outputs in enumerate(run.outputs[step]):
        if all(bool(outputs[n].isfinite().all()) for n in indices):
            raise PropertyFailure(
                f"{place(workload, step, rank, index)}: expected inf or NaN somewhere "
                f"in its bucket, as rank {source} has {value} there; got finite averages"
            )
    # Not NonFiniteFailures, as the poisoned gradients aren't finite.
    for what, tensors in (("", run.outputs), ("errors in the state: ", run.errors)):
        try:
            require_finite(workload, replace(run, outputs=tensors), step + 1)
        except PropertyFailure as error:
            raise PropertyFailure(f"{what}{error} after {workload.poison}") from None
