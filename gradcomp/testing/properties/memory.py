"""Properties of a hook's state: the errors it holds back, its checkpoints, its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.testing.ranks import RankError
from gradcomp.testing.workload import Workload, flat

from .accuracy import BucketSteps
from .subject import (
    NonFiniteFailure,
    PropertyFailure,
    Subject,
    TooSlow,
    property_of,
    require_close_in_norm,
    require_same_outputs,
)

# The bytes that a state may hold for each tensor and each bucket, whatever the size of the gradients.
SMALL_TENSORS = 4096


def _declined(subject: Subject, workload: Workload) -> str:
    """Return how to decline error_feedback: by tracks, if the hook tracks a multiple of the mean."""
    hint = " (are errors kept by bucket index? DDP rearranges its buckets once)" * workload.rearranged
    alone = replace(workload, shapes=((8, 9),), buckets=(), spectra=("flat",), noise=1.0)
    with suppress(NonFiniteFailure, RankError, TooSlow):
        found = [_steady(subject, each) for each in (alone, replace(alone, shapes=((7,),)))]
        mean, output, factor = max(found, key=lambda each: abs(each[2] - 1))
        if factor > 0 and (output - factor * mean).norm() <= TRACKED_WITH_MOMENTUM_WITHIN * output.norm():
            return f"tracks={factor:.2g} (EF21, momentum, errors that decay){hint}"
    return f"error_feedback=False{hint}"


# The most steps in which an element is expected to come out, and those that are added for errors to settle.
MOST_STEPS, SETTLING_STEPS = 320, 32
# An element is stuck if in the last steps less than this fraction of what is held back of it comes out.
STUCK = 1 / 16


@property_of(
    "error_feedback",
    unclaimed=lambda claims: "" if claims.tracks is None else f"tracks is {claims.tracks:g}",
    declined=_declined,
    workloads=lambda drawn: drawn.any(
        extra_steps=12, max_numel=64, num_tensors=(1, 3), rearranged=st.booleans(), accumulated=st.booleans()
    ),
    listed=lambda drawn: [
        *drawn.listed("twins", "ties", "four", "five", "sixteen", "longer", "bf16"),
        *drawn.listed("long", "large", noise=0.0),
    ],
    fraction=0.5,
    measure="still held at the end ≤",
)
def held_back_comes_out(subject: Subject, workload: Workload) -> Iterator[float]:
    """Each element that is held back is output in later steps with zero gradients.

    held = Σ mean gradients − Σ outputs is the mean of the ranks' errors. In the K zero_steps at the end only
    errors are compressed. By default there are as many as each element needs to come out, 320 at most.

    - In the last S of them, in which each element is sent (see `Claims.steps_until_sent`), Σ |output| must be
      at least a sixteenth of |held|, unless the bucket's outputs are larger. Not checked if K < S.
    - If all ranks have the same gradients (noise 0), a δ-contraction lets ‖held‖² fall at least to (1 − δ)^K
      of its value before the zero steps. δ is claims.contraction, and at least 1 / numel: the weakest usual
      compressors send one element, or signs with one common magnitude. A lossy hook that claims no
      contraction must end at half of the most that it held, or was given, in a step before.

    A difference within rounding is allowed; see `BucketSteps`.

    Yields ‖held‖ at the end / before the zero steps; nothing if no error is held back.
    """
    claims = subject.claims
    largest_numel = max(workload.numel(*indices) for indices in workload.buckets)
    zero_steps = min(SETTLING_STEPS + claims.steps_until_sent(largest_numel), MOST_STEPS)
    workload = replace(workload, zero_steps=workload.zero_steps or zero_steps)
    for bucket in BucketSteps.each(claims, subject.finite_run(workload)):
        numel = bucket.means.shape[1]
        held, rounding = bucket.held[-1], bucket.rounding[-1]
        last = claims.steps_until_sent(numel)
        if last <= workload.zero_steps and numel:
            out = bucket.outputs[-last:].abs().sum(0)
            latest = float(bucket.outputs[-math.ceil(last / 4) :].abs().max())
            stuck = (held.abs() > max(rounding, latest)) & (out < STUCK * held.abs())
            if stuck.any():
                worst = int(torch.where(stuck, held.abs(), 0).argmax())
                expected, got = (float(each[:, worst].sum()) for each in (bucket.means, bucket.outputs))
                raise PropertyFailure(
                    f"step {workload.num_steps - 1}, {bucket.name}, element {worst} of the bucket: expected "
                    f"Σ outputs = Σ mean gradients = {expected:.6g}, off by at most {rounding:.3g}; got "
                    f"{got:.6g}, and in the last {last} steps, with zero gradients, only "
                    f"{float(out[worst]):.3g} came out; {int(stuck.sum())} of {numel} elements are stuck"
                )
        norms, rounding = bucket.held.norm(dim=1).tolist(), rounding * math.sqrt(numel)
        before, after = norms[-1 - workload.zero_steps], norms[-1]
        if claims.is_lossy and claims.contraction is None:
            largest = max(*norms[: -workload.zero_steps], *bucket.means.norm(dim=1).tolist())
            allowed = (1 - STUCK) * largest + rounding  # however long it rises before
        else:
            delta = max(claims.contraction or 0.0, 1 / max(1, numel))
            allowed = math.sqrt(1 - delta) ** workload.zero_steps * before + rounding
        if after > allowed and not workload.noise:
            raise PropertyFailure(
                f"step {workload.num_steps - 1}, {bucket.name}: before {workload.zero_steps} steps with zero "
                f"gradients ‖Σ mean gradients − Σ outputs‖ was {before:.6g}; expected at most {allowed:.6g} "
                f"after them, got {after:.6g}"
            )
        if before > rounding:
            yield after / before


# How far the outputs may be from claims.tracks times the mean: with momentum, elements that wait add up more.
TRACKED_WITHIN, TRACKED_WITH_MOMENTUM_WITHIN = 0.1, 0.4


@property_of(
    "tracks",
    workloads=lambda drawn: drawn.any(max_numel=64, num_tensors=(1, 2)),
    listed=lambda drawn: drawn.listed("twins", "four", "sixteen"),
    fraction=0.5,
    measure="off by",
)
def tracks_the_mean(subject: Subject, workload: Workload) -> Iterator[float]:
    """For gradients that stay the same, the outputs approach claims.tracks times the mean gradient.

    ‖output − c · mean‖ is at most a tenth of ‖c · mean‖, or 0.4 of it unless tracks is 1. The output is an
    average over the second half of 64 steps or more, in which each element is sent; see
    `Claims.steps_until_sent`. c is between 1, the factor of elements that are always sent, and tracks.

    Yields the difference as a fraction of ‖c · mean‖; nothing for zero gradients.
    """
    tracks = subject.claims.tracks
    assert tracks is not None
    mean, output, factor = _steady(subject, workload)
    if mean.any():
        factor = min(max(factor, min(1.0, tracks)), max(1.0, tracks))
        within = TRACKED_WITHIN if tracks == 1 else TRACKED_WITH_MOMENTUM_WITHIN
        allowed, whose = within * abs(factor) * float(mean.norm()), f"{factor:g} × the mean"
        yield require_close_in_norm("rank 0's last steps", factor * mean, output, allowed, whose) * within


def _steady(subject: Subject, workload: Workload) -> tuple[Tensor, Tensor, float]:
    """Run steps with the same gradients: their mean, and rank 0's mean output in the second half.

    The third value is the factor c for which ‖output − c · mean‖ is smallest.
    """
    start, numel = subject.claims.start, workload.numel(*range(len(workload.shapes)))
    num = min(max(SETTLING_STEPS, subject.claims.steps_until_sent(numel)), MOST_STEPS)
    run = subject.finite_run(replace(workload, period=1, steps=start + 2 * num, zero_steps=0))
    mean = flat(run.workload.mean(0))
    output = torch.stack([flat(by_rank[0]) for by_rank in run.outputs[-num:]]).mean(0)
    return mean, output, float(mean @ output / mean.square().sum())


@property_of(
    "error_feedback",
    unclaimed=lambda claims: "" if claims.errors_of and claims.exact_shapes else "no exact shapes",
    declined="exact_shapes=None",
)
def no_error_where_exact(subject: Subject, workload: Workload) -> None:
    """Tensors of claims.exact_shapes, which are averaged exactly, have no error on any rank.

    The error, the rank's gradient minus the mean, would cancel in the average and grow as a random walk.
    """
    claims = subject.claims
    run = subject.finite_run(workload, errors_of=claims.errors_of)
    for error in replace(run, outputs=run.errors).each_output():
        if claims.is_exact(workload.shapes[error.index]) and error.average.count_nonzero():
            raise PropertyFailure(
                f"{error}: expected no error, as it isn't compressed; got one of norm "
                f"{float(error.average.double().norm()):.3g}, the gradient's is "
                f"{workload.norm(error.step, error.index):.3g}"
            )


@property_of("checkpoint", workloads=lambda drawn: drawn.any(extra_steps=4))
def checkpoint_round_trip(subject: Subject, workload: Workload) -> None:
    """A run that saves and loads its state half way has the same bits as a run without the checkpoint.

    claims.checkpoint: "safe" by torch.load's safe default (weights_only=True), "any" by any way of `reload`.
    """
    claims, run = subject.claims, subject.run(workload)
    half = (claims.start + workload.num_steps) // 2
    try:
        resumed = subject.run(workload, checkpoint_at=half, safe_checkpoint=claims.checkpoint == "safe")
    except RankError as error:
        raise PropertyFailure(f"saved and loaded before step {half}: {str(error).splitlines()[0]}") from error
    require_same_outputs(run, resumed, f"without the checkpoint before step {half}")


@property_of("memory", measure="state / gradients ≤")
def bounded_memory(subject: Subject, workload: Workload) -> Iterator[float]:
    """A state's tensors take at most claims.memory times the gradients' bytes, and don't grow in every step.

    4096 bytes more are allowed for each tensor and each bucket. All tensors reachable from the state count,
    one per storage. After the second compressed step their bytes must not grow.
    """
    claims = subject.claims
    assert claims.memory is not None
    workload = replace(workload, steps=max(workload.steps, claims.start + 5), zero_steps=0)
    run = subject.run(workload)
    settled = claims.start + 1
    num_small = len(workload.shapes) + len(workload.buckets)
    allowed = claims.memory * workload.num_bytes + SMALL_TENSORS * num_small
    for step, rank in product(range(workload.num_steps), range(workload.world_size)):
        num_bytes, before = (run.state_bytes[each][rank] for each in (step, min(step, settled)))
        if num_bytes > min(allowed, before):
            as_before = f"no larger than after step {settled}, {before} bytes"
            expected = as_before if num_bytes <= allowed else f"of at most {allowed:.0f} bytes"
            where = f"step {step}, rank {rank}: gradients of {workload.num_bytes} bytes"
            raise PropertyFailure(f"{where}: expected a state {expected}, got {num_bytes}")
    yield max(run.state_bytes[-1]) / max(1, workload.num_bytes)
