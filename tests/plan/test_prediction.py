"""Test the model of links, timelines and steps: limits, cases by hand, and values that must rise or fall."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gradcomp.plan.candidates import CANDIDATES, Collective, Payload
from gradcomp.plan.hardware import (
    CPU,
    GPUS,
    LAUNCH_S,
    WITHIN_ROUND_TRIP_S,
    Link,
    MeasuredDevice,
    Nodes,
    Rate,
    fitted_rate,
    sent_bytes,
)
from gradcomp.plan.models import Bucket, buckets_of, built_in_model
from gradcomp.plan.prediction import BucketTimes, Compute, end_of_backward, predict_step

H200 = GPUS[0]
INFINITE = Link(math.inf, 0.0)
GIGABIT = 1e9 / 8
COMPUTE = Compute(forward_s=0.010, backward_s=0.020, optimizer_s=0.003)
BUCKETS = buckets_of(built_in_model("resnet50").parameters)
WORLD_SIZES = (1, 2, 4, 8, 64, 512, 8192)


def step(hook, link, world_size=4, device=H200, compute=COMPUTE, buckets=BUCKETS, **options):
    return predict_step(buckets, CANDIDATES[hook], link, world_size, compute, device, **options)


# --- the link ---


def test_collectives_by_hand():
    link = Link(bytes_per_s=1000.0, latency_s=0.5)
    assert link.seconds(Collective("all-reduce", 400), 4) == 6 * 0.5 + 2 * 3 / 4 * 400 / 1000
    assert link.seconds(Collective("all-to-all", 400), 4) == 3 * 0.5 + 3 / 4 * 400 / 1000
    assert link.seconds(Collective("all-gather", 400), 4) == 3 * 0.5 + 3 / 4 * 400 / 1000
    for kind in ("all-reduce", "all-to-all", "all-gather"):
        assert link.seconds(Collective(kind, 400), 1) == 0
        assert sent_bytes(Collective(kind, 400), 1) == 0


def test_nccl_takes_a_tree_where_that_is_faster():
    link = Link(bytes_per_s=1e9, latency_s=1e-3, has_tree=True)
    small, large = Collective("all-reduce", 1000), Collective("all-reduce", 10**12)
    assert link.seconds(small, 1024) == pytest.approx(2 * 10 * 1e-3 + 2 * 1000 / 1e9)
    assert link.seconds(large, 4) == pytest.approx(6e-3 + 1.5 * 1000)
    ring = Link(1e9, 1e-3)
    assert link.seconds(small, 1024) < ring.seconds(small, 1024)
    assert link.seconds(Collective("all-gather", 1000), 1024) == ring.seconds(
        Collective("all-gather", 1000), 1024
    )


def test_exchanges_by_hand():
    """A round trip takes 0.5 s: one for any number of ranks, half if receives are posted; a ring has many."""
    link = Link(bytes_per_s=1000.0, latency_s=0.5, nodes=Nodes(2, 100.0), gathers_by_messages=True)
    assert link.has_delay
    assert link.seconds(Collective("all-reduce", 400, "between"), 8) == 6 * 0.5 + 2 * 3 / 4 * 400 / 1000
    assert link.seconds(Collective("all-to-all", 400, "between"), 8) == 0.5 + 3 / 4 * 400 / 1000
    posted = Collective("all-gather", 400, "between", is_posted=True)
    assert link.seconds(posted, 8) == 0.25 + 3 / 4 * 400 / 1000
    assert link.seconds(posted, 2) == 0
    assert link.seconds(Collective("all-gather", 400, "within"), 8) == WITHIN_ROUND_TRIP_S + 2, (
        "no delay there"
    )
    measured = {("all-gather", "between"): Rate(100.0, 0.2)}
    assert replace(link, measured=measured).seconds(posted, 8) == 0.1 + 3 / 4 * 400 / 100
    assert not replace(link, latency_s=0.004).has_delay
    assert not replace(link, gathers_by_messages=False).has_delay


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bandwidth_has_to_be_positive(bad):
    with pytest.raises(ValueError, match=r"bandwidth is .*; it must be positive"):
        Link(bad, 0.0)


@pytest.mark.parametrize("bad", [-1e-6, math.nan, math.inf])
def test_a_latency_must_not_be_negative(bad):
    with pytest.raises(ValueError, match=r"latency is .* must not be negative"):
        Link(1.0, bad)


@pytest.mark.parametrize("kind", ["all-reduce", "all-to-all", "all-gather"])
def test_a_fit_finds_the_link_that_it_was_measured_on(kind):
    link = Link(bytes_per_s=2.5e8, latency_s=40e-6)
    measured = [Collective(kind, size) for size in (1000, 30_000, 10**6, 10**7)]
    found = fitted_rate([(each, link.seconds(each, 5)) for each in measured], INFINITE, 5)
    assert found.bytes_per_s == pytest.approx(2.5e8)
    assert found.latency_s == pytest.approx(40e-6)


def fitted_to(world_size, *samples):
    timed = [(Collective("all-reduce", size), seconds) for size, seconds in samples]
    return fitted_rate(timed, INFINITE, world_size)


def test_a_fit_has_no_negative_rate():
    faster_when_larger = fitted_to(2, (1000, 2.0), (2000, 1.0))
    assert faster_when_larger.bytes_per_s == math.inf
    assert faster_when_larger.latency_s > 0
    steep = fitted_to(2, (1000, 1.0), (2000, 4.0))
    assert steep.latency_s == 0
    assert 0 < steep.bytes_per_s < math.inf


@pytest.mark.parametrize("samples", [[], [(1000, 1.0)], [(1000, 1.0), (1000, 2.0)]])
def test_a_fit_needs_two_sizes(samples):
    with pytest.raises(ValueError, match="with at least two sizes"):
        fitted_to(2, *samples)
    with pytest.raises(ValueError, match="on at least 2 ranks"):
        fitted_to(1, (1000, 1.0), (2000, 2.0))


def test_a_measured_collective_has_its_own_rate():
    link = Link(1e9, 0.0, measured={("all-to-all", "all"): Rate(1e3, 0.0)})
    assert link.seconds(Collective("all-to-all", 2000), 2) == 1.0
    assert link.seconds(Collective("all-gather", 2000), 2) == 1e-6


# --- the timeline ---


def test_a_timeline_by_hand():
    """Two buckets are ready at 2 and 4 s of a backward of 4 s."""

    def end(*times, is_inline=False):
        buckets = [
            BucketTimes(ready, local_s, ((0.0, sent_s),))
            for ready, (local_s, sent_s) in zip((2.0, 4.0), times, strict=True)
        ]
        return end_of_backward(buckets, 4.0, is_inline=is_inline)

    assert end((0, 0), (0, 0)) == 4
    assert end((0, 1), (0, 1)) == 5, "the first is hidden, the last can't be"
    assert end((0, 5), (0, 1)) == 8, "the second waits for the first"
    assert end((0.5, 1), (0.5, 1)) == 6, "compressing the first makes the second 0.5 s later"
    assert end((0.5, 5), (0.5, 1)) == 9, "but not what is hidden behind the first anyway"
    for is_inline in (True, False):
        assert end_of_backward([], 4.0, is_inline=is_inline) == 4
        assert end((0, 5), (0, 1), is_inline=is_inline) == 8


def test_a_timeline_by_hand_where_hooks_compress_on_backwards_thread():
    def end(*collectives_s, local_s=0.5, is_ring=False):
        """Buckets are ready at 2, 4, 4, … s."""
        ready = (2.0, *(4.0 for _ in collectives_s[1:]))
        pairs = zip(ready, collectives_s, strict=True)
        buckets = [BucketTimes(ready_s, local_s, each, is_ring) for ready_s, each in pairs]
        return end_of_backward(buckets, 4.0, is_inline=True)

    sent = ((0.0, 1.0),)
    assert end(sent, sent) == 6, "compressing makes both later, the first is hidden"
    assert end(((0.0, 5.0),), sent) == 8.5, "the second is compressed while the first is sent"
    # With a round trip of 3 s: 4 + 3 s, then half a round trip, whatever the number of buckets.
    delayed = (3.0, 0.0), (1.5, 0.0)
    assert end(delayed, delayed, local_s=0) == end(*[delayed] * 5, local_s=0) == 8.5
    assert end(delayed, ((1.0, 0.0),), local_s=0) == 6.5, "the second exchange begins after backward, at 5"
    # The last two send from 4 to 6 s and have answers at 8 and 9 s. All second exchanges take 1 s and 1.5 s.
    slow = (3.0, 1.0), (1.5, 1.0)
    assert end(slow, slow, slow, local_s=0) == 11.5
    # A ring waits for the last but one.
    assert end(*[((3.0, 0.0),)] * 4, local_s=0, is_ring=True) == 10


# --- the step ---


@pytest.mark.parametrize("hook", CANDIDATES)
def test_an_infinite_link_leaves_compute_and_compression(hook):
    for world_size in WORLD_SIZES:
        found = step(hook, INFINITE, world_size)
        assert found.communication_s == 0
        assert found.step_s == pytest.approx(COMPUTE.step_s + found.local_s)
    if CANDIDATES[hook].is_compressing:
        assert found.local_s > 0
    else:
        assert found.step_s == COMPUTE.step_s


@pytest.mark.parametrize("hook", CANDIDATES)
def test_one_rank_has_nothing_to_communicate(hook):
    found = step(hook, Link(GIGABIT, 1e-3), world_size=1)
    assert found.communication_s == found.sent_bytes == 0


@pytest.mark.parametrize("device", [H200, CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("hook", CANDIDATES)
def test_more_bandwidth_is_never_slower(hook, device):
    steps = [
        step(hook, Link(bits / 8, 20e-6, has_tree=True), 16, device=device).step_s
        for bits in (1e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 4e11)
    ]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(steps))
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("hook", CANDIDATES)
def test_more_ranks_never_communicate_less(hook):
    """World sizes are powers of two, so the fraction of padding in a shard never grows."""
    for has_tree in (False, True):
        found = [step(hook, Link(GIGABIT, 20e-6, has_tree), world_size) for world_size in WORLD_SIZES]
        times = [each.communication_s for each in found]
        assert all(after >= before * (1 - 1e-3) for before, after in pairwise(times))
        if CANDIDATES[hook].bits is CANDIDATES[hook].rank is None:
            assert all(after.step_s >= before.step_s for before, after in pairwise(found))


@pytest.mark.parametrize("hook", CANDIDATES)
def test_latency_and_compression_only_add(hook):
    slow, quick = Link(GIGABIT, 1e-3), Link(GIGABIT, 0.0)
    assert step(hook, slow).step_s > step(hook, quick).step_s
    free = MeasuredDevice("free", dict.fromkeys(CANDIDATES, 0.0), is_inline=False)
    assert step(hook, quick).step_s >= step(hook, quick, device=free).step_s


@pytest.mark.parametrize(
    ("hook", "world_size", "num_round_trips"),
    [
        ("none", 2, 2),  # gloo's own rings: 2 (W − 1), of two buckets at the same time
        ("none", 4, 6),
        ("bf16", 2, 1),
        ("bf16", 4, 1.5),
        ("int4", 2, 1),
        ("int4", 4, 1.5),
        ("powersgd:4", 4, 1.5),  # P, then Q, which is posted before, in one exchange each
        ("powersgd:4:int8", 4, 1.5),
    ],
)
def test_round_trips_of_a_step_with_a_delay(hook, world_size, num_round_trips):
    """However many buckets there are, a step waits once for their round trips of 100 ms."""
    delayed = Link(math.inf, 0.1, gathers_by_messages=True)
    shapes = [(1024, 1024)] * 2 if hook == "none" else [(1024, 1024)] * 12
    buckets = [replace(each, ready_at=1.0) for each in buckets_of(shapes, cap_bytes=2**21)]
    assert len(buckets) == len(shapes)
    found = step(hook, delayed, world_size, CPU, buckets=buckets)
    waited = found.step_s - COMPUTE.step_s - found.local_s
    assert waited == pytest.approx(0.1 * num_round_trips)


def test_what_is_hidden():
    """hidden_s: the time of own work and collectives, minus the time that they add to the step."""
    for hook in CANDIDATES:
        for link in (INFINITE, Link(GIGABIT, 1e-5), Link(100 * GIGABIT, 1e-5)):
            found = step(hook, link)
            added = found.step_s - COMPUTE.step_s
            assert found.hidden_s == pytest.approx(found.local_s + found.communication_s - added)
    assert step("none", Link(GIGABIT, 0.0)).hidden_s > 0


def test_on_a_cpu_collectives_are_hidden_and_compression_is_not():
    for hook in CANDIDATES:
        found = step(hook, Link(GIGABIT, 1e-5), device=CPU)
        assert 1e-6 < found.hidden_s <= found.communication_s


def test_a_gpus_own_work_is_bytes_and_launches():
    payload = Payload((), moved_bytes=0.8 * 4.8e12, num_launches=5)
    assert H200.local_s(CANDIDATES["int4"], payload, 1) == pytest.approx(1 + 5 * LAUNCH_S)
    buckets = [Bucket(((1000, 1000),), 1.0)]
    ns = {"fp16": 3.0}
    found = step("fp16", INFINITE, device=MeasuredDevice("timed", ns), buckets=buckets)
    assert found.local_s == pytest.approx(3e-3)
    with pytest.raises(ValueError, match="hook int4 has not been timed on timed; there are fp16"):
        step("int4", INFINITE, device=MeasuredDevice("timed", ns), buckets=buckets)


def test_half_the_bytes_take_half_the_time():
    link = Link(GIGABIT, 0.0)
    none, fp16 = step("none", link), step("fp16", link)
    assert fp16.communication_s == pytest.approx(none.communication_s / 2)
    assert fp16.sent_bytes == none.sent_bytes / 2 == 1.5 * fp16.collective_bytes
    bf16_gradients = step("none", link, dtype=torch.bfloat16)
    assert bf16_gradients.sent_bytes == fp16.sent_bytes


@pytest.mark.parametrize("world_size", [0, -1])
def test_there_is_one_rank_at_least(world_size):
    with pytest.raises(ValueError, match=f"a step of {world_size} ranks"):
        step("none", INFINITE, world_size)
