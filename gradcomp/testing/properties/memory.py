"""Properties of a hook's state: the errors it holds back, its checkpoints, its size."""

from __future__ import annotations

import math
from dataclasses import replace

from gradcomp.testing.claims import Claims
from gradcomp.testing.properties.accuracy import (
    ROUNDINGS_OF_A_STEP,
    BucketSteps,
    each_output,
    norm_of,
    norm_of_bucket,
    underflow,
    unless_lossy,
)
from gradcomp.testing.properties.subject import (
    PropertyFailure,
    Subject,
    place,
    property_of,
    require_close_in_norm,
    require_same,
)
from gradcomp.testing.ranks import RankError
from gradcomp.testing.workload import Workload

# The bytes that a state may hold for each tensor and each bucket, whatever the size of the gradients.
SMALL_TENSORS = 4096


def _unless_feedback(claims: Claims) -> str:
    return "" if claims.error_feedback else unless_lossy(claims) or "no error feedback"


def _unless_errors_can_be_read(claims: Claims) -> str:
    return _unless_feedback(claims) or ("" if claims.errors_of else "errors can't be read")


def _unless_some_shapes_are_exact(claims: Claims) -> str:
    return _unless_feedback(claims) or ("" if claims.errors_of and claims.exact_shapes else "no exact shapes")


@property_of(_unless_errors_can_be_read)
def error_feedback_identity(subject: Subject, workload: Workload) -> float:
    """After every step, Σ outputs + mean of the ranks' errors = Σ mean gradients.

    The check is step by step: output + mean error after = mean gradient + mean error before. The difference
    may be 8 u times the norms of the largest gradient, the errors and the output. Summed over the steps, this
    is algorithm 2 of Karimireddy et al., ICML 2019; for PowerSGD, algorithm 2 of Vogels et al., NeurIPS 2019.

    Returns the largest difference / allowed difference.
    """
    claims = subject.claims
    run = subject.finite_run(workload, errors_of=claims.errors_of)
    roundings = ROUNDINGS_OF_A_STEP * claims.feedback_roundoff(workload.dtype)
    worst = 0.0
    for step, rank, index, output in each_output(workload, run):
        before, after = (run.mean_error(s)[index] for s in (step - 1, step))
        errors = [e[index] for s in (step - 1, step) if s >= 0 for e in run.errors[s]]
        size = norm_of(workload, step, index) + float(output.double().norm())
        size += 2 * max(float(error.double().norm()) for error in errors)
        allowed = roundings * size + 2 * underflow(claims, workload, index)
        where = place(workload, step, rank, index)
        expected = workload.mean(step)[index] + before
        whose = "mean gradient + mean error before"
        got = output.double() + after
        worst = max(worst, require_close_in_norm(where, expected, got, allowed, whose))
    return worst


@property_of(_unless_feedback)
def held_back_comes_out(subject: Subject, workload: Workload) -> float | None:
    """Held-back errors are output in later steps with zero gradients.

    The check looks at outputs, not at the state: held = Σ mean gradients − Σ outputs is the mean of the
    ranks' errors. In the K zero_steps at the workload's end only errors are compressed. So with a
    δ-contraction ‖held‖² falls at least to

        (1 − δ)^K · its value before the zero steps             if all ranks have the same gradients (noise 0)
        (1 − δ)^K · 4 (1 − δ) / δ² · max ‖gradient‖²            otherwise

    The second bound is lemma 3 of Karimireddy et al., ICML 2019, for errors. Every bucket is checked by
    itself; for δ see `Claims.delta`. For a hook that averages, ‖held‖ falls in every step to a fraction that
    follows from its tolerance; see `Claims.left_after`.

    With the same gradients on every rank, the second half of the zero steps is checked by itself, too. Most
    of the error is output by then, so a small loss shows, for example if errors are multiplied by 0.999.

    The rounding allowed is 8 u (max ‖gradient‖ + ‖held‖) in every step.

    Returns ‖held‖ at the end / ‖held‖ before the zero steps. Returns None for a workload
    without zero steps, and if no error is held back.
    """
    if not workload.zero_steps:
        return None
    claims, run = subject.claims, subject.finite_run(workload)
    worst = None
    for bucket, indices in enumerate(workload.buckets):
        numel = sum(math.prod(workload.shapes[index]) for index in indices)
        for rank in range(workload.world_size):
            steps = BucketSteps.of(claims, workload, run, indices, rank)
            norms, half = steps.held.norm(dim=1).tolist(), workload.zero_steps // 2
            before, after, rounding = norms[-1 - workload.zero_steps], norms[-1], steps.rounding[-1]
            starts = {workload.zero_steps: before, half: norms[-1 - half]}
            if workload.noise:  # ranks' errors may be larger than their mean
                largest = max(norm_of_bucket(workload, step, indices) for step in range(workload.steps))
                starts = {workload.zero_steps: claims.largest_error(numel) * largest}
                rounding *= max(1.0, claims.largest_error(numel))
            for num_steps, start in starts.items():
                allowed = claims.left_after(num_steps, numel) * start + rounding
                if after > allowed:
                    raise PropertyFailure(
                        f"step {workload.num_steps - 1}, rank {rank}, bucket {bucket} "
                        f"with tensors {list(indices)}: before {num_steps} steps with zero gradients "
                        f"‖Σ mean gradients − Σ outputs‖ was {norms[-1 - num_steps]:.6g}; expected at most "
                        f"{allowed:.6g} after them, got {after:.6g}"
                        f"{subject.multiple(workload, steps.means.sum(0), steps.outputs.sum(0))}"
                    )
            if before > rounding:
                worst = max(worst or 0.0, after / before)
    return worst


@property_of(_unless_some_shapes_are_exact)
def no_error_where_exact(subject: Subject, workload: Workload) -> None:
    """Tensors of claims.exact_shapes, which are averaged exactly, have no error on any rank.

    An error of such a tensor would be the rank's gradient minus the mean. The ranks' errors would cancel in
    the average, and each would grow as a random walk, to √steps times the difference between ranks.
    """
    claims = subject.claims
    assert claims.exact_shapes is not None
    run = subject.finite_run(workload, errors_of=claims.errors_of)
    for step, by_rank in enumerate(run.errors):
        for rank, errors in enumerate(by_rank):
            for index, error in enumerate(errors):
                if claims.exact_shapes(workload.shapes[index]) and error.count_nonzero():
                    raise PropertyFailure(
                        f"{place(workload, step, rank, index)}: expected no error, as "
                        f"it isn't compressed; got one of norm {float(error.double().norm()):.3g}, the "
                        f"gradient's is {norm_of(workload, step, index):.3g}"
                    )


@property_of(lambda claims: "" if claims.checkpoint else "no state that can be saved")
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
    for step, rank, index, output in each_output(workload, resumed):
        where = place(workload, step, rank, index)
        expected, whose = run.outputs[step][rank][index], f"without the checkpoint before step {half}"
        require_same(where, expected, output, whose)


@property_of(lambda claims: "" if claims.memory is not None else "no state, or one that may grow")
def bounded_memory(subject: Subject, workload: Workload) -> float:
    """A state's tensors take at most claims.memory times the gradients' bytes, and don't grow in every step.

    Another 4096 bytes are allowed for each tensor and each bucket. All tensors reachable from the state
    count, one per storage. After the second compressed step their bytes must not grow.

    Returns the state's bytes / the gradients' bytes.
    """
    claims = subject.claims
    assert claims.memory is not None
    workload = replace(workload, steps=max(workload.steps, claims.start + 5), zero_steps=0)
    run = subject.run(workload)
    settled = claims.start + 1
    allowed = claims.memory * workload.num_bytes + SMALL_TENSORS * (
        len(workload.shapes) + len(workload.buckets)
    )
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
    return max(run.state_bytes[-1]) / max(1, workload.num_bytes)
