"""Test the bytes that leave a node, and the network's time for them."""

import math

import pytest

from benchmarks import models
from gradcomp.hooks.named_hooks import NAMES, NamedHook
from gradcomp.plan import Collective, Network, buckets_of, traffic

GIGABIT = 1.25e8
RESNET50 = models.buckets("resnet50")
# The multilayer perceptron of docs/network.md.
MLP = buckets_of([(1024, 784), (1024,), (1024, 1024), (1024,), (10, 1024), (10,)])
ALL_FORMS = [*NAMES, *(f"{name} hierarchical" for name in NAMES)]


def step(name, network, buckets=RESNET50):
    return traffic(buckets, NamedHook.form_named(name), network)


def on_nodes(per_node, num_nodes, backend="nccl", **options):
    return Network(per_node * num_nodes, ranks_per_node=per_node, backend=backend, **options)


# --- bytes that leave a node ---


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("none", 2751), ("bf16", 1376), ("int8", 2513), ("int4", 1276), ("int4 hierarchical", 275)],
)
def test_bytes_of_four_nodes_of_eight(name, megabytes):
    """355 million parameters on NCCL, computed by hand without the payload's padding."""
    found = step(name, on_nodes(8, 4), models.buckets("gpt2-medium"))
    assert found.sent_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "per_node"),
    [
        ("none", {1: 7.5, 2: 11.9, 3: 13.2}),
        ("int4", {1: 0.97, 2: 2.04, 3: 3.07}),
        ("int4 hierarchical", {1: 0.97, 2: 1.02, 3: 1.02}),
    ],
)
def test_bytes_are_those_that_two_hosts_sent_on_gloo(name, per_node):
    """The bytes were read from the hosts' interfaces; up to 6% are packet headers."""
    for ranks, megabytes in per_node.items():
        found = step(name, on_nodes(ranks, 2, "gloo"), MLP).sent_bytes / 1e6
        assert 0.93 * megabytes < found < 1.01 * megabytes


def test_large_factors_on_gloo_leave_a_node_once():
    """Of twice the factors half leaves each of two hosts, and five sixths in a flat ring of six ranks."""

    def leaving(form, ranks, side=4096):
        return step(f"powersgd:32{form}", on_nodes(ranks, 2, "gloo"), [[(side, side)]]).sent_bytes

    assert leaving(" hierarchical", 3) == pytest.approx(leaving("", 1))
    assert leaving("", 3) == pytest.approx(5 / 3 * leaving("", 1))
    assert leaving(" hierarchical", 3, 256) == leaving("", 3, 256), "small wires go around a ring in any case"


def test_messages_and_rings_by_hand():
    """12 ranks on 3 nodes of 4: a ring leaves a node once, messages 4 · 8 times."""
    for kind, group, on_nccl, on_gloo in (
        ("all-reduce", "all", 2 * 11 / 12, 2 * 11 / 12),
        ("all-to-all", "all", 4 * 8 / 12, 4 * 8 / 12),
        ("all-gather", "all", 11 / 12, 4 * 8 / 12),
        ("all-reduce", "between", 4 / 3, 4 / 3),
        ("all-to-all", "between", 2 / 3, 2 / 3),
        ("all-gather", "between", 2 / 3, 2 / 3),
        ("all-gather", "within", 0, 0),
        ("reduce-scatter", "within", 0, 0),
    ):
        for backend, expected in (("nccl", on_nccl), ("gloo", on_gloo)):
            found = on_nodes(4, 3, backend).sent_bytes(Collective(kind, 1200, group))
            assert found == pytest.approx(1200 * expected)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_hierarchical_no_more_leaves_a_node_of_many_ranks_than_a_rank_alone(backend):
    for name in ("int8", "int4", "powersgd:16:int8"):  # smaller payloads have more padding
        alone = step(name, on_nodes(1, 4, backend)).sent_bytes
        for ranks in (2, 4, 8):
            network = on_nodes(ranks, 4, backend)
            assert step(f"{name} hierarchical", network).sent_bytes == pytest.approx(alone, rel=0.03)
            assert step(name, network).sent_bytes > 1.3 * alone


@pytest.mark.parametrize("name", ALL_FORMS)
def test_nodes_of_one_rank_are_the_ranks(name):
    flat_name = "allreduce" if name == "none hierarchical" else name.split()[0]  # DDP's own knows no delay
    for backend in ("nccl", "gloo"):
        form, flat = (step(each, Network(16, GIGABIT, 0.1, backend=backend)) for each in (name, flat_name))
        assert (form.sent_bytes, form.wait_s) == (flat.sent_bytes, flat.wait_s)


@pytest.mark.parametrize("name", ALL_FORMS)
def test_nothing_leaves_the_only_node(name):
    for network in (
        Network(1, GIGABIT, 0.1),
        Network(8, GIGABIT, 0.1, 8),
        Network(8, GIGABIT, 0.1, 8, "gloo"),
    ):
        found = step(name, network)
        assert found.sent_bytes == found.transfer_s == found.wait_s == 0


# --- times ---


def test_the_time_of_bytes_is_by_the_nodes_bandwidth():
    slow, fast = (step("int4", Network(32, bytes_per_s, ranks_per_node=8)) for bytes_per_s in (1e6, 1e9))
    assert slow.transfer_s == slow.sent_bytes / 1e6
    assert slow.transfer_s == pytest.approx(1000 * fast.transfer_s)


def test_round_trips_by_hand():
    """8 ranks on 4 nodes. On gloo a ring's step is one, and so is an exchange of much; else it is a half."""
    mb = 2**20
    for kind, group, num_bytes, on_nccl, on_gloo in (
        ("all-reduce", "all", 1200, 2, 14),
        ("all-reduce", "between", 1200, 2, 6),
        ("all-to-all", "all", 1200, 0.5, 0.5),
        ("all-gather", "all", 8 * mb - 200, 3.5, 0.5),
        ("all-gather", "all", 8 * mb, 3.5, 1),  # a MB and a heading take 2 MB, from 7 ranks
        ("all-gather", "between", 16 * mb - 200, 1.5, 0.5),
        ("all-gather", "between", 16 * mb, 1.5, 1),
        ("all-gather", "within", 1200, 0, 0),
    ):
        collective = Collective(kind, num_bytes, group)
        for network, number in ((on_nodes(2, 4), on_nccl), (on_nodes(2, 4, "gloo"), on_gloo)):
            assert network.num_round_trips(collective) == number


@pytest.mark.parametrize(
    ("hook", "world_size", "num_round_trips"),
    [
        ("none", 2, 12),  # gloo's own rings: 2 (W − 1) each, two buckets at the same time
        ("none", 4, 36),
        ("bf16", 2, 0.5),
        ("bf16", 4, 1),
        ("int4", 2, 0.5),
        ("int4", 4, 1),
        ("powersgd:4", 4, 1),  # P, then Q, in one exchange each
        ("powersgd:4:int8", 4, 1),
    ],
)
def test_round_trips_of_a_step_with_a_delay(hook, world_size, num_round_trips):
    """However many buckets there are, a step of ours waits once for their round trips of 100 ms."""
    buckets = [[(1024, 1024)]] * 12
    found = step(hook, Network(world_size, round_trip_s=0.1, backend="gloo"), buckets)
    assert found.wait_s == pytest.approx(0.1 * num_round_trips)
    assert found.transfer_s == 0
    one = step(hook, Network(world_size, round_trip_s=0.1, backend="gloo"), buckets[:1])
    assert one.wait_s == pytest.approx(0.1 * (2 * (world_size - 1) if hook == "none" else num_round_trips))


def test_buckets_follow_one_another_on_nccl():
    buckets = [[(1024, 1024)]] * 12
    assert step("none", Network(16, round_trip_s=0.001), buckets).wait_s == pytest.approx(12 * 4 * 0.001)


def test_only_gloo_has_a_delay():
    assert Network(2, round_trip_s=0.005, backend="gloo").has_delay
    assert not Network(2, round_trip_s=0.004, backend="gloo").has_delay
    assert not Network(2, round_trip_s=0.005).has_delay


# --- errors ---


@pytest.mark.parametrize(("world_size", "per_node"), [(12, 8), (33, 8), (4, 8), (0, 1), (8, 0), (-8, 8)])
def test_ranks_are_whole_nodes(world_size, per_node):
    with pytest.raises(ValueError, match=f"{world_size} ranks are not whole nodes of {per_node} ranks"):
        Network(world_size, ranks_per_node=per_node)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bandwidth_has_to_be_positive(bad):
    with pytest.raises(ValueError, match=r"bandwidth is .*; it must be positive"):
        Network(2, bad)
