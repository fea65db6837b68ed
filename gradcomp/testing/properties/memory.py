"""Properties of a hook's state: the errors it holds back, its checkpoints, its size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from gradcomp.testing.ranks import RankError
from gradcomp.testing.run import Place
from gradcomp.testing.workload import Workload

from .accuracy import ROUNDINGS_OF_A_STEP, BucketSteps, place_in
from .subject import PropertyFailure, Subject, property_of, require_close_in_norm, require_same_outputs

# The bytes that a state may hold for each tensor and each bucket, whatever the size of the gradients.
SMALL_TENSORS = 4096


@property_of(
    "error_feedback",
    unclaimed=lambda claims: "" if claims.errors_of else "errors can't be read",
    listed=lambda drawn: drawn.listed("four", "various", "long"),
    measure="error / tolerance ≤",
)
def error_feedback_identity(subject: Subject, workload: Workload) -> Iterator[float]:
    """After every step, Σ outputs + mean of the ranks' errors = Σ mean gradients.

    The check is step by step: output + mean error after = mean gradient + mean error before. The difference
    may be 8 u times the norms of the largest gradient, the errors and the output. Summed over the steps, this
    is algorithm 2 of Karimireddy et al., ICML 2019; for PowerSGD, algorithm 2 of Vogels et al., NeurIPS 2019.

    Yields difference / allowed difference.
    """
    claims = subject.claims
    run = subject.finite_run(workload, errors_of=claims.errors_of)
    roundings = ROUNDINGS_OF_A_STEP * claims.feedback_roundoff(workload.dtype)
    for output in run.each_output():
        step, index = output.step, output.index
        before, after = (run.mean_error(s)[index] for s in (step - 1, step))
        errors = [error[index] for s in (step - 1, step) if s >= 0 for error in run.errors[s]]
        size = workload.norm(step, index) + float(output.average.double().norm())
        size += 2 * max(float(error.double().norm()) for error in errors)
        allowed = roundings * size + 2 * claims.underflow(workload, index)
        expected, got = output.mean + before, output.average.double() + after
        whose = "mean gradient + mean error before"
        yield require_close_in_norm(output, expected, got, allowed, whose)


# An element is stuck if in the last steps less than this fraction of what is held back of it comes out.
STUCK = 1 / 16


@property_of(
    "error_feedback",
    workloads=lambda drawn: [drawn.flushed()],
    listed=lambda drawn: map(
        drawn.with_zeros,
        [*drawn.listed("twins", "ties", "four", "five"), *drawn.listed("long", "large", noise=0.0)],
    ),
    fraction=0.5,
    measure="still held at the end ≤",
    copyable=True,
)
def held_back_comes_out(subject: Subject, workload: Workload) -> Iterator[float]:
    """Each element that is held back is output in later steps with zero gradients.

    The check looks at outputs, not at the state: held = Σ mean gradients − Σ outputs is the mean of the
    ranks' errors. In the K zero_steps at the workload's end only errors are compressed.

    - In the last S zero steps, Σ |output| must be at least a sixteenth of |held|, at every element. S is the
      number of steps in which each element is sent, see `Claims.steps_until_sent`. Otherwise what is held
      back is lost. An element may wait while the bucket's outputs are larger. With fewer zero steps this
      isn't checked.
    - If all ranks have the same gradients (noise 0), a δ-contraction lets ‖held‖² fall at least to (1 − δ)^K
      of its value before the zero steps. δ is claims.contraction, and at least 1 / numel: the weakest usual
      compressors send one element, or signs with one common magnitude. A lossy hook that claims no
      contraction must end at half of the most that it held, or was given, in a step before.

    A difference within rounding is allowed; see `BucketSteps`.

    Yields ‖held‖ at the end / ‖held‖ before the zero steps; nothing for a workload without zero steps, and if
    no error is held back.
    """
    if not workload.zero_steps:
        return
    claims, run = subject.claims, subject.finite_run(workload)
    for bucket in BucketSteps.each(claims, run):
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
                position, element = place_in(map(workload.numel, bucket.indices), worst)
                steps = range(claims.start, workload.num_steps)
                place = Place(bucket.rank, steps, bucket.indices[position], element, expected, got)
                raise PropertyFailure(
                    f"step {workload.num_steps - 1}, {bucket.name}, element {worst} of the bucket: expected "
                    f"Σ outputs = Σ mean gradients = {expected:.6g}, off by at most {rounding:.3g}; got "
                    f"{got:.6g}, and in the last {last} steps, with zero gradients, only "
                    f"{float(out[worst]):.3g} came out; {int(stuck.sum())} of {numel} elements are stuck",
                    place,
                )
        norms, rounding = bucket.held.norm(dim=1).tolist(), rounding * math.sqrt(numel)
        before, after = norms[-1 - workload.zero_steps], norms[-1]
        if claims.is_lossy and claims.contraction is None:
            largest = max(*norms[: -workload.zero_steps], *bucket.means.norm(dim=1).tolist())
            allowed = largest / 2 + rounding  # however long it rises before
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


@property_of(
    "error_feedback",
    unclaimed=lambda claims: "" if claims.errors_of and claims.exact_shapes else "no exact shapes",
)
def no_error_where_exact(subject: Subject, workload: Workload) -> None:
    """Tensors of claims.exact_shapes, which are averaged exactly, have no error on any rank.

    An error of such a tensor would be the rank's gradient minus the mean. The ranks' errors would cancel in
    the average, and each would grow as a random walk, to √steps times the difference between ranks.
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


@property_of("checkpoint", workloads=lambda drawn: [drawn.any(extra_steps=4)])
def checkpoint_round_trip(subject: Subject, workload: Workload) -> None:
    """A run that saves and loads its state half way has the same bits as a run without the checkpoint.

    If claims.checkpoint is "safe", the state must survive torch.save and torch.load with its safe default
    (weights_only=True). If it is "any", any way of `reload` is enough.
    """
    claims, run = subject.claims, subject.run(workload)
    half = (claims.start + workload.num_steps) // 2
    try:
        is_safe = claims.checkpoint == "safe"
        resumed = subject.run(workload, checkpoint_at=half, safe_checkpoint=is_safe)
    except RankError as error:
        raise PropertyFailure(f"saved and loaded before step {half}: {str(error).splitlines()[0]}") from error
    whose = f"without the checkpoint before step {half}"
    require_same_outputs(run, resumed, whose)


@property_of("memory", measure="state / gradients ≤")
def bounded_memory(subject: Subject, workload: Workload) -> Iterator[float]:
    """A state's tensors take at most claims.memory times the gradients' bytes, and don't grow in every step.

    Another 4096 bytes are allowed for each tensor and each bucket. All tensors reachable from the state
    count, one per storage. After the second compressed step their bytes must not grow.

    Yields the state's bytes / the gradients' bytes.
    """
    claims = subject.claims
    assert claims.memory is not None
    workload = replace(workload, steps=max(workload.steps, claims.start + 5), zero_steps=0)
    run = subject.run(workload)
    settled = claims.start + 1
    num_small = len(workload.shapes) + len(workload.buckets)
    allowed = claims.memory * workload.num_bytes + SMALL_TENSORS * num_small
    for step, by_rank in enumerate(run.state_bytes):
        for rank, num_bytes in enumerate(by_rank):
            where = f"step {step}, rank {rank}: gradients of {workload.num_bytes} bytes"
            if num_bytes > allowed:
                raise PropertyFailure(
                    f"{where}: expected a state of at most {allowed:.0f} bytes, got {num_bytes}"
                )
            if step > settled and num_bytes > run.state_bytes[settled][rank]:
                raise PropertyFailure(
                    f"{where}: expected a state no larger than after step {settled}, "
                    f"{run.state_bytes[settled][rank]} bytes; got {num_bytes}"
                )
    yield max(run.state_bytes[-1]) / max(1, workload.num_bytes)
