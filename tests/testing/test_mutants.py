"""Planted bugs are each found by a property, which holds for the hook without the bug."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pydoc import locate

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase

from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.testing import NonFiniteFailure, Workload, check_hook, claims_of, properties
from tests.depth import everyday
from tests.testing import compressors, mutants, wrong_averages

# Bugs are planted by replacing functions of the plain torch implementation.
pytestmark = pytest.mark.usefixtures("plain_torch", "not_shrunk")


@pytest.fixture
def not_shrunk(monkeypatch):
    """Report the first counterexample: shrinking it takes most of the time."""
    monkeypatch.setattr("gradcomp.testing.check.PHASES", (Phase.generate,))


@dataclass(frozen=True)
class Sound:
    """A hook that fulfills its claims. claims: changes to the inferred claims."""

    hook: Callable
    make_state: Callable | None
    claims: dict = field(default_factory=dict)
    world_size: int = 2


def power_sgd(process_group):
    """Make a state of rank 2 that compresses all matrices, however small."""
    return powerSGD_hook.PowerSGDState(process_group, 2, start_powerSGD_iter=2, min_compression_rate=0.01)


def power_sgd_of_rank(rank):
    """Return PowerSGD of this rank with the default min_compression_rate."""
    make_state = partial(powerSGD_hook.PowerSGDState, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return Sound(powerSGD_hook.powerSGD_hook, make_state)


POWER_SGD = Sound(powerSGD_hook.powerSGD_hook, power_sgd)
RANK_1, RANK_16 = map(power_sgd_of_rank, (1, 16))
FP16 = Sound(default_hooks.fp16_compress_hook, None)
TOP_K = Sound(compressors.hook, compressors.TopK, {"bucket_insensitive": True})
# Three ranks: with two, sums are equal in any order.
TOP_K_OF_THREE = Sound(compressors.hook, compressors.TopK, world_size=3)
RANDOM_K = Sound(compressors.hook, compressors.RandomK)
# Quantizer's state keeps tensors that look like errors, but are zero.
QUANTIZER = Sound(compressors.hook, compressors.Quantizer, {"unbiased": True, "error_feedback": False})
INT8 = Sound(compressors.hook, compressors.Int8)

# Bugs in gradcomp's code: each of these functions returns the replacement of a function.


def error_dropped(reconstruct):
    def replacement(stack, buffer):
        reconstruct(stack, buffer)
        stack.settle().zero_()

    return replacement


def sum_for_mean(project):
    return lambda plan, buffer, scale, left_out: project(plan, buffer, 1.0, left_out)


def divided_twice(back_project):
    return lambda plan, buffer, scale: back_project(plan, buffer, scale**2)


def not_normal(reconstruct):
    def replacement(plan, buffer, seed):
        reconstruct(plan, buffer, seed)
        for group in plan.groups:
            group.direction.copy_(group.qt)

    return replacement


def not_orthonormal(_):
    return lambda panels, epsilon, scratch: None


def another_q_on_each_rank(random):
    return lambda plan, seed: random(plan, seed + dist.get_rank())


def stale_p(reconstruct):
    def replacement(stack, buffer):
        fresh = stack.p.clone()
        stack.p.copy_(getattr(stack, "before", fresh))
        stack.before = fresh
        reconstruct(stack, buffer)

    return replacement


def stale_p_where_rows_are_odd(reconstruct):
    stale = stale_p(reconstruct)

    def replacement(stack, buffer):
        rows = stack.p.shape[-2]
        (stale if rows > 16 and rows % 2 else reconstruct)(stack, buffer)

    return replacement


def swallowed_by_rank_1(value):
    def swallowed(project):
        def replacement(plan, buffer, scale, left_out):
            if dist.get_rank() == 1:
                buffer[buffer.isnan() if math.isnan(value) else buffer == value] = 0
            project(plan, buffer, scale, left_out)

        return replacement

    return swallowed


nan_swallowed, minus_inf_swallowed = map(swallowed_by_rank_1, (math.nan, -math.inf))


def last_row_missing(product):
    def replacement(stack, which, out, **how):
        product(stack, which, out, **how)
        out[:, -1] = 0

    return replacement


def cast_before_division(_):
    return lambda buffer, *, out, scale=1.0, **_: out.copy_(buffer).mul_(scale)


def one_wire_for_all_buckets(_):
    wires = {}

    def replacement(bucket, dtype):
        wire = wires.setdefault(dist.get_rank(), torch.empty(1 << 16, dtype=dtype))
        return wire[: bucket.buffer().numel()], lambda: None

    return replacement


MATRIX_GROUP, PLAN = "gradcomp.cpu.powersgd.MatrixGroup", "gradcomp.cpu.powersgd.PowerSGDPlan"
# (hook, planted bug, property that finds it). A bug is a mutant of the hook's compressor, or (gradcomp's
# function to replace, the function that makes the replacement).
PLANTED = [
    (POWER_SGD, (f"{MATRIX_GROUP}.reconstruct", error_dropped), "held_back_comes_out"),
    (POWER_SGD, (f"{PLAN}.project", sum_for_mean), "averages"),
    (POWER_SGD, (f"{PLAN}.back_project", divided_twice), "exact_up_to_rank"),
    (POWER_SGD, ("gradcomp.cpu.powersgd.orthonormalize", not_orthonormal), "contraction"),
    (POWER_SGD, (f"{PLAN}._random", another_q_on_each_rank), "rank_permutation"),
    (POWER_SGD, (f"{MATRIX_GROUP}.reconstruct", stale_p), "held_back_comes_out"),
    (RANK_1, (f"{MATRIX_GROUP}.reconstruct", stale_p_where_rows_are_odd), "exact_up_to_rank"),
    (RANK_16, (f"{MATRIX_GROUP}.reconstruct", stale_p_where_rows_are_odd), "contraction"),
    (RANK_1, (f"{PLAN}.project", nan_swallowed), "nonfinite_seen_by_all"),
    (RANK_1, (f"{PLAN}.project", minus_inf_swallowed), "nonfinite_seen_by_all"),
    (POWER_SGD, (f"{MATRIX_GROUP}._product", last_row_missing), "exact_up_to_rank"),
    (FP16, ("gradcomp.ops.cast", cast_before_division), "finite_in_finite_out"),
    (FP16, ("gradcomp.comm.all_reduce.take_wire", one_wire_for_all_buckets), "averages"),
    (TOP_K, mutants.ErrorTimes999, "held_back_comes_out"),
    (INT8, mutants.Int8ErrorTimes999, "held_back_comes_out"),
    (INT8, mutants.Int8ErrorsIn16Bits, "held_back_comes_out"),
    (TOP_K, mutants.ErrorOfTheGradient, "held_back_comes_out"),
    (TOP_K, mutants.ErrorOfTheAverage, "held_back_comes_out"),
    (TOP_K, mutants.ErrorKeptNan, "nonfinite_seen_by_all"),
    (TOP_K, mutants.SharedErrors, "held_back_comes_out"),
    (TOP_K, mutants.ErrorsByPosition, "held_back_comes_out"),
    (TOP_K, mutants.ErrorNotSaved, "checkpoint_round_trip"),
    (TOP_K, mutants.Hoarder, "bounded_memory"),
    (TOP_K, mutants.FirstRanksIndices, "rank_permutation"),
    (TOP_K, mutants.SwallowedNan, "nonfinite_seen_by_all"),
    (TOP_K, mutants.Threshold, "scale_equivariant"),
    (TOP_K, mutants.WholeBucket, "bucket_insensitive"),
    (TOP_K_OF_THREE, mutants.OwnFirst, "replicas_identical"),
    (RANDOM_K, mutants.OwnIndices, "replicas_identical"),
    (RANDOM_K, mutants.Unseeded, "deterministic"),
    (QUANTIZER, mutants.RoundedTwice, "unbiased"),
    (QUANTIZER, mutants.FromCallbacks, "completes"),
    (QUANTIZER, mutants.DividedInASideCallback, "deterministic"),
]

# Bugs in averages that are found although nothing is claimed: (mutant, property that finds it).
PLANTED_IN_AVERAGES = [
    (wrong_averages.SquaresTransposed, "unbiased"),
    (wrong_averages.RowOverwritten, "unbiased"),
    (wrong_averages.KernelsFlipped, "averages"),
    (wrong_averages.FarElementsLeftOut, "averages"),
    (wrong_averages.TopKOfSquaresTransposed, "contraction"),
    (wrong_averages.LastBucketSummed, "averages"),
    (wrong_averages.ViewsOfTheFirstStep, "averages"),
    (wrong_averages.EveryTwentyFifthStepWithoutRank1, "averages"),
    (wrong_averages.StaleAverages, "averages"),
    (wrong_averages.ErrorForgottenLate, "held_back_comes_out"),
    (wrong_averages.SumsInInt8, "held_back_comes_out"),
    (wrong_averages.OnePercentTooLarge, "averages"),
    (wrong_averages.RescaledTooLittle, "unbiased"),
    (wrong_averages.RescaledIn20Steps, "unbiased"),
    (wrong_averages.OneCoin, "variance"),
    (wrong_averages.MasksUsedTwice, "variance"),
    (wrong_averages.NoLevelAtZero, "zero_stays_zero"),
    (wrong_averages.Dithered, "zero_stays_zero"),
]


def check(sound, only, **options):
    """Check a hook like a user who doesn't know of the bug: claims are inferred from the sound hook."""
    claims = replace(claims_of(sound.hook, sound.make_state), **sound.claims)
    options |= {"world_size": sound.world_size, "claims": claims, "only": only}
    return check_hook(sound.hook, sound.make_state, **options)


def plant(monkeypatch, name, make):
    monkeypatch.setattr(name, make(locate(name)))


@pytest.mark.parametrize(
    ("sound", "bug", "by"),
    PLANTED,
    ids=[bug.__name__ if isinstance(bug, type) else bug[1].__name__ for _, bug, _ in PLANTED],
)
def test_a_planted_bug_is_found(sound, bug, by, monkeypatch):
    if isinstance(bug, type):
        sound = replace(sound, make_state=bug)
    else:
        plant(monkeypatch, *bug)
    (failure,) = check(sound, [by]).failures
    assert failure.property == by
    # It is found by its outputs, not by an exception.
    assert "Traceback" not in failure.message


@pytest.mark.parametrize(("bug", "by"), PLANTED_IN_AVERAGES, ids=[b.__name__ for b, _ in PLANTED_IN_AVERAGES])
def test_a_wrong_average_is_found_though_nothing_is_claimed(bug, by):
    """Claims are inferred from the hook with the bug; they must not excuse the bug."""
    (failure,) = check_hook(compressors.hook, bug, only=[by]).failures
    assert failure.property == by
    assert "Traceback" not in failure.message


def test_a_direction_that_is_not_normal_is_found(monkeypatch):
    """From the second compressed step on, P scales with the gradients' square: a factor of 2^90 overflows."""
    claims = replace(claims_of(POWER_SGD.hook, power_sgd), max_magnitude=2.0**100)
    case = (POWER_SGD.hook, power_sgd, Workload(((7, 13),), steps=4, log2_factor=90))
    properties.finite_in_finite_out(*case, claims=claims)
    plant(monkeypatch, f"{PLAN}.reconstruct", not_normal)
    with pytest.raises(
        NonFiniteFailure, match=r"step 3, rank 0, tensor 0 \[7, 13\] in bucket 0: expected finite"
    ):
        properties.finite_in_finite_out(*case, claims=claims)


SOUND = [POWER_SGD, RANK_1, RANK_16, FP16, TOP_K, TOP_K_OF_THREE, RANDOM_K, QUANTIZER, INT8]


@pytest.mark.parametrize("sound", everyday([POWER_SGD, TOP_K_OF_THREE, QUANTIZER], SOUND))
def test_without_a_bug_all_holds(sound):
    """Every property that finds a bug planted in a hook holds for the hook itself."""
    finders = {by for planted_in, _, by in PLANTED if planted_in == sound}
    report = check(sound, finders, max_examples=everyday(2, 5))
    assert {by for by, verdict in report.verdicts.items() if verdict.outcome == "holds"} == finders, report


def test_what_is_kept_and_is_no_error():
    """Claims say whether kept tensors are errors, and how precise errors are."""
    for mutant, said in (
        (compressors.Quantizer, {"error_feedback": False}),
        (mutants.Int8ErrorsIn16Bits, {"feedback_precision": torch.bfloat16}),
    ):
        for claims, ok in (({}, False), (said, True)):
            sound = Sound(compressors.hook, mutant, claims)
            report = check(sound, ["held_back_comes_out"], max_examples=everyday(2, 10) if ok else 10)
            assert report.ok == ok, report
