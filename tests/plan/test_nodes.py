"""Nodes of several ranks behind one network card: bytes and times by hand, limits, and errors."""

import math

import pytest
import torch

from gradcomp.plan.candidates import CANDIDATES, Collective, candidate_named
from gradcomp.plan.hardware import CPU, GPUS, Link, MeasuredDevice, Nodes, Rate
from gradcomp.plan.models import buckets_of, built_in_model
from gradcomp.plan.prediction import Compute, predict_step

H200 = GPUS[0]
COMPUTE = Compute(forward_s=0.010, backward_s=0.020, optimizer_s=0.003)
GPT2 = buckets_of(built_in_model("gpt2-medium").parameters)
RESNET50 = buckets_of(built_in_model("resnet50").parameters)
# The multilayer perceptron of docs/network.md.
MLP = buckets_of([(1024, 784), (1024,), (1024, 1024), (1024,), (10, 1024), (10,)])
WITH_STATE = [name for name, hook in CANDIDATES.items() if hook.has_state]
NVLINK = 360e9


def link(ranks=8, cards=1, within=NVLINK, gigabits=12.5, latency_s=1e-5, is_gloo=False):
    return Link(
        gigabits * 1e9 / 8,
        latency_s,
        has_tree=not is_gloo,
        nodes=Nodes(ranks, within, cards),
        gathers_by_messages=is_gloo,
    )


def hook_named(name):
    """Return the hook of this name: by nodes if the name ends with " by nodes", else flat."""
    flat = CANDIDATES[name.removesuffix(" by nodes")]
    return flat.by_nodes() if name.endswith(" by nodes") else flat


def step(name, on, world_size, buckets=RESNET50, device=H200, **options):
    return predict_step(buckets, hook_named(name), on, world_size, COMPUTE, device, **options)


# --- bytes that leave a node ---


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("none", 2751),
        ("bf16", 1376),
        ("int8", 2513),
        ("int4", 1276),
        ("int4 by nodes", 275),
    ],
)
def test_bytes_of_four_nodes_of_eight(name, megabytes):
    """355 million parameters on NCCL, computed by hand without the payload's padding."""
    assert step(name, link(), 32, GPT2).leaving_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "per_node"),
    [
        ("none", {1: 7.5, 2: 11.9, 3: 13.2}),
        ("int4", {1: 0.97, 2: 2.04, 3: 3.07}),
        ("int4 by nodes", {1: 0.97, 2: 1.02, 3: 1.02}),
    ],
)
def test_bytes_are_those_that_two_hosts_sent_on_gloo(name, per_node):
    """The bytes were read from the hosts' interfaces; up to 6% are packet headers."""
    for ranks, megabytes in per_node.items():
        found = step(name, link(ranks, is_gloo=True), 2 * ranks, MLP, CPU).leaving_bytes / 1e6
        assert 0.93 * megabytes < found < 1.01 * megabytes


def test_large_factors_on_gloo_leave_a_node_once():
    """Of twice the factors half leaves each of two hosts by nodes, and five sixths in a ring of six ranks."""
    hook, layer = candidate_named("powersgd:32"), buckets_of([(4096, 4096)])

    def leaving(hook, ranks, buckets):
        on = link(ranks, is_gloo=True)
        device = MeasuredDevice("cpu", {"powersgd:32": 1.0})
        return predict_step(buckets, hook, on, 2 * ranks, COMPUTE, device).leaving_bytes

    alone = leaving(hook, 1, layer)
    assert leaving(hook.by_nodes(), 3, layer) == pytest.approx(alone)
    assert leaving(hook, 3, layer) == pytest.approx(5 / 3 * alone)
    small = buckets_of([(256, 256)])  # its wires go around a ring in any case
    assert leaving(hook.by_nodes(), 3, small) == leaving(hook, 3, small)


def test_messages_and_rings_by_hand():
    """12 ranks on 3 nodes of 4: a ring leaves a node once, messages 4 · 8 times."""
    for kind, on_nccl, on_gloo in (
        ("all-reduce", 2 * 11 / 12, 2 * 11 / 12),
        ("all-to-all", 4 * 8 / 12, 4 * 8 / 12),
        ("all-gather", 11 / 12, 4 * 8 / 12),
    ):
        for is_gloo, expected in ((False, on_nccl), (True, on_gloo)):
            found = link(4, is_gloo=is_gloo).leaving_bytes(Collective(kind, 1200), 12)
            assert found == pytest.approx(1200 * expected)
    for kind, group, expected in (
        ("all-to-all", "between", 2 / 3),
        ("all-gather", "between", 2 / 3),
        ("all-gather", "within", 0),
        ("reduce-scatter", "within", 0),
    ):
        found = link(4).leaving_bytes(Collective(kind, 1200, group), 12)
        assert found == pytest.approx(1200 * expected)


def test_by_nodes_no_more_leaves_a_node_of_many_ranks_than_a_rank_alone():
    for name in ("int8", "int4", "powersgd:16:int8"):  # smaller payloads have more padding
        for is_gloo in (False, True):
            alone = step(name, link(1, is_gloo=is_gloo), 4).leaving_bytes
            for ranks in (2, 4, 8):
                on = link(ranks, is_gloo=is_gloo)
                assert step(f"{name} by nodes", on, 4 * ranks).leaving_bytes == pytest.approx(alone, rel=0.03)
                assert step(name, on, 4 * ranks).leaving_bytes > 1.3 * alone


@pytest.mark.parametrize("name", WITH_STATE)
def test_both_forms_save_equally_many_bytes(name):
    """Both forms keep equally much of a gradient; collective_bytes is compared with docs/accuracy.md."""
    flat, by_nodes = (step(each, link(), 32) for each in (name, f"{name} by nodes"))
    assert flat.collective_bytes == by_nodes.collective_bytes


# --- times ---


def test_the_slower_of_cards_and_links_within_counts():
    on = Link(1000.0, 0.5, nodes=Nodes(4, 500.0))
    ring, messages = Collective("all-reduce", 1200), Collective("all-to-all", 1200)
    # 12 ranks: a ring sends 2200 B on every link, messages 3200 B by the card and 300 B within.
    assert on.seconds(ring, 12) == pytest.approx(22 * 0.5 + 2200 / 500)
    assert on.seconds(messages, 12) == pytest.approx(11 * 0.5 + 3200 / 1000)
    two_cards = Link(1000.0, 0.5, nodes=Nodes(4, 1e9, cards=2))
    assert two_cards.seconds(ring, 12) == pytest.approx(22 * 0.5 + 2200 / 2000)
    assert on.seconds(Collective("reduce-scatter", 1200, "within"), 12) == pytest.approx(1.5 + 900 / 500)
    assert on.seconds(Collective("all-gather", 1200, "within"), 12) == pytest.approx(1.5 + 900 / 500)
    assert on.seconds(Collective("all-to-all", 1200, "between"), 12) == pytest.approx(1.0 + 800 / 1000)


def test_a_measured_rate_within_a_node_is_a_ranks_and_between_nodes_a_cards():
    measured = {("all-gather", "within"): Rate(250.0, 2.0), ("all-gather", "between"): Rate(100.0, 3.0)}
    on = Link(1000.0, 0.5, nodes=Nodes(4, 500.0), measured=measured)
    assert on.seconds(Collective("all-gather", 1200, "within"), 12) == pytest.approx(3 * 2.0 + 900 / 250)
    assert on.seconds(Collective("all-gather", 1200, "between"), 12) == pytest.approx(2 * 3.0 + 800 / 100)
    assert on.seconds(Collective("all-to-all", 1200, "between"), 12) == pytest.approx(1.0 + 800 / 1000)


def test_a_tree_takes_cards_and_links_within():
    small = Collective("all-reduce", 1000)
    on = Link(1e9, 1e-3, has_tree=True, nodes=Nodes(8, 1e3))
    assert on.seconds(small, 1024) == pytest.approx(20e-3 + 2)
    assert Link(1e3, 1e-3, has_tree=True, nodes=Nodes(8, 1e9)).seconds(small, 1024) == pytest.approx(2.02)


def test_quantizing_is_divided_among_a_nodes_ranks():
    """4 bits, many nodes. With any number of ranks, an element moves 8 B to the wire, 4.5 B to dequantize."""
    shapes, by_nodes = [(8192, 8192)], CANDIDATES["int4"].by_nodes()

    def per_element(ranks, dtype=torch.float32):
        payload = by_nodes.payload(shapes, dtype, 1024, ranks)
        assert payload.num_launches == 4
        return payload.moved_bytes / 8192**2

    code = 0.5 + 2 / 128
    for ranks in (2, 8):
        quantized = (4 + 8 + 2 * code) / ranks
        assert per_element(ranks) == pytest.approx(8 + 4 + code + quantized, abs=0.03)
    assert per_element(8, torch.bfloat16) == pytest.approx(per_element(8) - 4)


def test_a_measured_device_quantizes_a_part():
    flat, *by_nodes = (
        step(name, link(ranks), 4 * ranks, device=CPU).local_s
        for name, ranks in (("int4", 8), ("int4 by nodes", 2), ("int4 by nodes", 8))
    )
    assert flat > by_nodes[0] > by_nodes[1] > 0.2 * flat


# --- limits ---


@pytest.mark.parametrize("name", [*CANDIDATES, *(f"{name} by nodes" for name in WITH_STATE)])
def test_nodes_of_one_rank_are_the_ranks(name):
    for is_gloo in (False, True):
        plain = Link(12.5e9 / 8, 1e-5, has_tree=not is_gloo, gathers_by_messages=is_gloo)
        as_nodes = step(name, link(1, within=1.0, is_gloo=is_gloo), 16)
        flat = step(name.removesuffix(" by nodes"), plain, 16)
        assert as_nodes.step_s == flat.step_s
        assert as_nodes.local_s == flat.local_s
        assert as_nodes.leaving_bytes == as_nodes.sent_bytes == flat.sent_bytes


@pytest.mark.parametrize("name", [*CANDIDATES, *(f"{name} by nodes" for name in WITH_STATE)])
def test_nothing_leaves_the_only_node(name):
    slow_card, fast_card = (step(name, link(8, gigabits=gigabits), 8) for gigabits in (0.001, 100))
    assert slow_card.leaving_bytes == 0
    assert slow_card.step_s == fast_card.step_s
    assert slow_card.sent_bytes > 0


@pytest.mark.parametrize("name", [*CANDIDATES, *(f"{name} by nodes" for name in WITH_STATE)])
def test_more_cards_and_faster_links_are_never_slower(name):
    for is_gloo in (False, True):
        usual = step(name, link(is_gloo=is_gloo), 32).step_s
        assert step(name, link(cards=8, is_gloo=is_gloo), 32).step_s < usual
        assert step(name, link(within=math.inf, is_gloo=is_gloo), 32).step_s <= usual
        assert step(name, link(within=1e9, is_gloo=is_gloo), 32).step_s >= usual


def test_a_card_per_rank_is_a_link_per_rank_for_messages():
    """Only a rank's messages within its node don't use its card."""
    collective, own = Collective("all-to-all", 10**9), Link(1e9, 1e-5)
    assert link(4, cards=4, gigabits=8).seconds(collective, 64) == pytest.approx(
        own.seconds(collective, 64) * 60 / 63, rel=1e-3
    )


# --- errors ---


def test_only_hooks_with_a_state_are_by_nodes():
    for name in CANDIDATES.keys() - WITH_STATE:
        with pytest.raises(ValueError, match=f"{name} can't be by nodes; hooks with a state can"):
            CANDIDATES[name].by_nodes()
    for name, on_nccl in (("bf16", False), ("int4", True), ("powersgd:4", False), ("powersgd:4:int8", True)):
        assert CANDIDATES[name].has_form_by_nodes(is_gloo=False) is on_nccl
        assert CANDIDATES[name].has_form_by_nodes(is_gloo=True) is (name != "bf16")
    twice = CANDIDATES["int4"].by_nodes().by_nodes()
    assert twice == CANDIDATES["int4"].by_nodes()
    assert (twice.name, twice.flat_name) == ("int4 by nodes", "int4")


@pytest.mark.parametrize("world_size", [4, 12, 33])
def test_ranks_are_whole_nodes(world_size):
    for name in ("none", "int4", "int4 by nodes"):
        with pytest.raises(ValueError, match=f"{world_size} ranks are not whole nodes of 8 ranks"):
            step(name, link(8), world_size)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((0, 1e9), "a node has 0 ranks; it must have at least 1"),
        ((-2, 1e9), "a node has -2 ranks"),
        ((8, 0.0), r"the bandwidth within a node is 0\.0 bytes/s; it must be positive"),
        ((8, math.nan), "the bandwidth within a node is nan"),
        ((8, 1e9, 0), "a node has 0 network cards for 8 ranks"),
        ((8, 1e9, 3), "a node has 3 network cards for 8 ranks; equally many ranks must share every card"),
        ((1, 1e9, 2), "a node has 2 network cards for 1 ranks"),
    ],
)
def test_nodes_that_can_not_be_are_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Nodes(*nodes)
