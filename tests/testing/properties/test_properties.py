"""Each property holds for sound hooks, and fails for broken ones with a message that says where."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from benchmarks.kit_verdicts import OURS
from gradcomp.hooks import default_hooks
from gradcomp.testing import Claims, PropertyFailure, Tolerance, Workload, claims_of, properties, strategies
from gradcomp.testing.properties.subject import require_close
from tests.depth import everyday
from tests.testing.averaging import done
from tests.testing.compressors import Halves
from tests.testing.compressors import hook as compressed
from tests.testing.wrong_averages import MasksUsedTwice

FP32 = Tolerance.rounding(torch.float32)
AVERAGES = Claims(FP32, torch.float32, scale_equivariant=True, rank_symmetric=True, bucket_insensitive=True)
LOSSY = Claims(None, torch.float32, contraction=0.0, scale_equivariant=True, rank_symmetric=True)
UNBIASED = replace(LOSSY, unbiased=True)
WORKLOAD = Workload(((6, 5), (3,), (8, 8)), ((2, 1), (0,)), steps=3, noise=1.0, drift=0.5, seed=3)

pytestmark = pytest.mark.usefixtures("plain_torch")


def mean(tensor, group):
    dist.all_reduce(tensor.div_(group.size()), group=group)
    return tensor


def local(change):
    """Make a hook that averages `change(buffer)` of every rank's bucket."""
    return lambda state, bucket: done(mean(change(bucket.buffer()), state))


def after(change):
    """Make a hook that returns `change(mean, bucket)`."""
    return lambda state, bucket: done(change(mean(bucket.buffer(), state), bucket))


class Forgetful(Halves):
    def kept(self, total):
        return torch.zeros_like(total)


class Hoarder(Halves):
    def kept(self, total):
        self.errors[f"step {len(self.errors)}"] = total
        return super().kept(total)


class LosesErrors(Halves):
    def __getstate__(self):
        return super().__getstate__() | {"errors": {}}


HALVES = replace(
    LOSSY,
    contraction=0.75,
    error_feedback=True,
    errors_of=lambda state: {k: v for k, v in state.errors.items() if isinstance(k, int)},
    bucket_insensitive=True,
    checkpoint="any",
    memory=1.0,
)
count = itertools.count()


def raise_on_rank_1(state, bucket):
    if dist.get_rank() == 1:
        raise OSError("no such device")
    return done(mean(bucket.buffer(), state))


def from_rank_0(state, bucket):
    dist.broadcast(bucket.buffer(), 0)
    return done(bucket.buffer())


def row_0_everywhere(average, bucket):
    for gradient in bucket.gradients():
        gradient.copy_(gradient[:1].clone().expand_as(gradient))
    return average


def last_row_missing(average, bucket):
    average[-5:] = 0
    return average


IN_BF16 = replace(AVERAGES, tolerance=Tolerance.rounding(torch.bfloat16), precision=torch.bfloat16)
# (property, hook, claims, message)
FAILURES = [
    ("completes", raise_on_rank_1, AVERAGES, r"schedule 0: rank 1 raised OSError: no such device"),
    (
        *("replicas_identical", lambda state, bucket: done(bucket.buffer()), AVERAGES),
        r"step 0, rank 1, tensor 0 \[6, 5\] in bucket 1, element 0: expected -?[\d.]+ \(as on rank 0\), "
        r"got -?[\d.]+; off by \S+, allowed 0; 30 of 30",
    ),
    (
        *("averages", local(lambda buffer: buffer * 2), AVERAGES),
        r"step 0, rank 0, tensor 0 .* element \d+: expected \S+ \(the float64 mean\), got \S+; off by \S+, "
        r"allowed \S+e-0",
    ),
    ("deterministic", after(lambda m, b: m + next(count)), AVERAGES, r"0: expected .* \(the first run's\)"),
    ("bucket_insensitive", after(lambda m, b: m * (1 + b.index())), AVERAGES, r"\(the output of Workload\("),
    ("rank_permutation", from_rank_0, AVERAGES, r"expected \S+ \(the output of Workload\(.*off by"),
    ("scale_equivariant", local(lambda b: b.clamp(-1, 1)), AVERAGES, r"the output without the factor 2\^4"),
    ("finite_in_finite_out", after(lambda m, b: m / m.norm()), AVERAGES, r"got nan in 3 of 3 elements"),
    ("finite_in_finite_out", local(torch.exp), AVERAGES, r"got inf .* log2_factor=\d+: .* \S+e\+12 claimed"),
    ("nonfinite_seen_by_all", local(lambda b: b.nan_to_num(0, 0, 0)), AVERAGES, r"as rank 1 .*; got finite"),
    (
        *("contraction", local(torch.neg), LOSSY),
        r"claimed contraction 0.0; got -3: step 0, rank 0, bucket 0 with tensors \[2, 1\]: expected",
    ),
    (
        *("contraction", local(lambda b: b * 0.4), replace(LOSSY, contraction=0.75)),
        r"claimed contraction 0.75; got 0.64: .*\(1 − 0.75\)",
    ),
    ("exact_up_to_rank", after(last_row_missing), replace(LOSSY, exact_rank=2), r"of rank ≤ 2, of norm"),
    (
        *("unbiased", local(torch.trunc), UNBIASED),
        r"over 256 steps with two gradients in turn, the (first|second) one, tensor \d .* allowed 5",
    ),
    (
        *("variance", local(lambda b: b * 2 * (torch.rand(b.shape) < 0.5)), replace(UNBIASED, variance=0.1)),
        r"claimed variance 0.1; got ω = 0.[45]\d* over 256 steps .*; chance explains 0.\d+ more",
    ),
    (
        *("variance", after(lambda m, b: m * 2 * (torch.rand(()) < 0.5)), replace(UNBIASED, variance=1.0)),
        r"over 256 steps .*: all elements share \d+% of the noise, at most 50% expected",
    ),
    (
        *("averages", after(lambda m, b: m * 1.01), IN_BF16),
        r"every element is within its tolerance, but all \d+ averages together are 1.01 × the mean",
    ),
    (
        *("zero_stays_zero", after(lambda m, b: m + 1e-6), replace(AVERAGES, keeps_zeros="elements")),
        r"step 0, rank 0, tensor 0 \[40, 50\] .* expected 0, as its gradient has been 0 on every rank .* "
        r"got 1e-06; \d+ of \d+ such elements",
    ),
    (
        *("zero_stays_zero", after(row_0_everywhere), replace(LOSSY, keeps_zeros="lines")),
        r"tensor 0 \[40, 50\] .* such elements are not 0",
    ),
    (
        *("held_back_comes_out", Forgetful, HALVES),
        r"expected Σ outputs = Σ mean gradients = .* in the last \d+ steps, with zero gradients, only",
    ),
    (
        *("no_error_where_exact", Halves, replace(HALVES, exact_shapes=lambda shape: len(shape) == 1)),
        r"tensor 1 \[3\] .* expected no error",
    ),
    ("checkpoint_round_trip", LosesErrors, HALVES, r"without the checkpoint before step \d\)"),
    ("checkpoint_round_trip", Halves, replace(HALVES, checkpoint="safe"), r"CheckpointError: torch.save and"),
    ("bounded_memory", Hoarder, HALVES, r"rank 0: gradients of 388 bytes: expected a state no larger than"),
    ("bounded_memory", Halves, replace(HALVES, memory=-60.0), r"at most -2\d+ bytes, got \d+"),
]


@pytest.mark.parametrize(("name", "hook", "claims", "message"), FAILURES)
def test_a_failure_says_where_and_what(name, hook, claims, message):
    hook, make_state = (compressed, hook) if isinstance(hook, type) else (hook, None)
    workload = WORKLOAD
    if name == "zero_stays_zero" or message.startswith("every element"):
        workload = Workload(((40, 50),), steps=2, noise=0.1, drift=1.0, masked=0.5)
    if message.startswith("got nan"):
        workload = replace(WORKLOAD, spectra=("flat", "zero"), buckets=((1,), (0, 2)))
    with pytest.raises(PropertyFailure, match=f"(?s){name}: .*{message}"):
        getattr(properties, name)(hook, make_state, workload, claims=claims)


# These hooks can't be pickled: tests/testing/test_wrong_hooks.py has one in processes.
@pytest.mark.parametrize("name", sorted(set(properties.__all__) - {"same_in_processes"}))
def test_sound_hooks_hold_them(name):
    """Each property returns its measured value, or None if it isn't claimed."""
    check = getattr(properties, name)
    averages = check(local(lambda buffer: buffer), None, WORKLOAD, claims=AVERAGES)
    halves = check(compressed, Halves, replace(WORKLOAD, zero_steps=8), claims=HALVES)
    expected = {
        "averages": (lambda ratio: 0 < ratio < 1, None),
        "contraction": (None, lambda delta: delta == pytest.approx(0.75)),
        "held_back_comes_out": (None, lambda left: left == pytest.approx(2.0**-8, rel=1e-3)),
        "finite_in_finite_out": (lambda largest: largest > 1e11, lambda largest: largest > 1e11),
        "bounded_memory": (None, lambda ratio: ratio == 1.0),
    }.get(name, (None, None))
    for measured, is_right in zip((averages, halves), expected, strict=True):
        assert is_right(measured) if is_right else measured in (None, 0.0)


def test_unbiased_hooks_are_not_failed_and_small_biases_are_found():
    def rounded(state, bucket, bias=0.0):
        return done(mean((bucket.buffer() * 2 + torch.rand(bucket.buffer().shape) + bias).floor() / 2, state))

    for seed in range(everyday(3, 8)):
        workload = Workload(((4, 4),), noise=1.0, seed=seed)
        assert abs(properties.unbiased(rounded, None, workload, claims=UNBIASED)) < 4
    with pytest.raises(PropertyFailure, match="t = "):
        properties.unbiased(partial(rounded, bias=0.1), None, workload, claims=UNBIASED)


class OtherHalfNext(MasksUsedTwice):
    def exchange(self, flat, sent, scale):
        if self.step % 2:
            sent = torch.ones(len(flat)).index_fill(0, sent, 0).nonzero()[:, 0]
        super().exchange(flat, sent, scale)


def test_the_last_bit_of_fp64_is_shown():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(PropertyFailure, match=r"got 1\.0000000000000002; off by"):
        require_close("here", one, one + 2.0**-52, 0.0, "rank 0's")


def test_noise_that_the_next_step_cancels_is_no_fault():
    workload, claims = Workload(((8, 8),), noise=1.0), replace(UNBIASED, variance=1.0)
    assert properties.variance(compressed, OtherHalfNext, workload, claims=claims) > 0


def test_a_small_tensor_in_one_matrix_with_a_large_one_is_no_fault():
    workload = Workload(((101, 1), (1,)), world_size=3, steps=3, log2_scale=(19, 0), noise=0.1)
    assert properties.rank_permutation(*OURS["batched r=1"], workload) < 1


@settings(max_examples=everyday(5, 100), derandomize=True, database=None)
@given(strategies.workloads(log2_scales=(-10, 10)))
def test_a_property_alone(workload):
    assert 0 <= properties.averages(default_hooks.fp16_compress_hook, None, workload) <= 1


def test_on_real_processes():
    workload = replace(WORKLOAD, spectra=("power_law",))
    options = {"claims": claims_of(default_hooks.allreduce_hook), "ranks": "gloo"}
    for name in ("completes", "replicas_identical", "averages", "deterministic", "nonfinite_seen_by_all"):
        getattr(properties, name)(default_hooks.allreduce_hook, None, workload, **options)
    with pytest.raises(PropertyFailure, match=r"(?s)rank 1 .*OSError: no such device"):
        properties.completes(raise_on_rank_1, None, workload, **options)
