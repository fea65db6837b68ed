"""Compare predictions of the bytes that hooks send and move with the hooks and with docs/accuracy.md."""

import os
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gradcomp.bench.steps import register
from gradcomp.compress.accuracy_cost import MEASURED, accuracy_cost
from gradcomp.plan.candidates import CANDIDATES, Candidate, candidate_named
from gradcomp.plan.hardware import sent_bytes
from gradcomp.plan.models import buckets_of, built_in_model
from tests.programs import ROOT

FP32 = torch.float32
SHAPES = ((300, 200), (200,), (64, 3, 7, 7), (5, 4), ())


def sent(name, shapes, world_size=2, dtype=FP32):
    return CANDIDATES[name].payload(shapes, dtype, world_size).collective_bytes


def test_powersgds_rate_for_one_matrix():
    """(n + m) · r elements cross the wire in place of n · m."""
    n, m, r = 1024, 512, 4
    assert sent("powersgd:4", [(n, m)]) == 4 * (n + m) * r
    assert sent("powersgd:4:bf16", [(n, m)]) == 2 * (n + m) * r
    # A byte per element, and a bf16 scale per 128 elements: these lengths are whole blocks and sections.
    assert sent("powersgd:4:int8", [(n, m)]) == (1 + 2 / 128) * (n + m) * r
    assert sent("powersgd:4", [(n, m), (m,)]) == 4 * ((n + m) * r + m)
    assert sent("powersgd:4", [(8, 8)]) == 4 * 8 * 8, "a matrix that isn't worth compressing is sent whole"


def test_bytes_of_the_others_by_hand():
    n, m = 256, 512
    assert sent("none", [(n, m), (m,)]) == 4 * (n * m + m)
    assert sent("none", [(n, m)], dtype=torch.bfloat16) == 2 * n * m
    assert sent("bf16", [(n, m)]) == sent("fp16", [(n, m)]) == 2 * n * m
    assert sent("int8", [(n, m), (m,)]) == (1 + 2 / 128) * n * m + 4 * m
    assert sent("int4", [(n, m), (m,)]) == (1 / 2 + 2 / 128) * n * m + 4 * m


class SentMeter(TorchDispatchMode):
    """Counts this rank's messages, its all-reduces, and the bytes that it sends in both."""

    def __init__(self):
        super().__init__()
        self.num_messages, self.num_all_reduces, self.num_bytes = 0, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name == "send":
            self.num_messages += 1
            self.num_bytes += args[0][0].nbytes
        elif name == "allreduce_":
            self.num_all_reduces += 1
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.num_bytes += 2 * (size - 1) / size * args[0][0].nbytes
        else:
            assert func.namespace != "c10d" or name == "recv_"
        return func(*args, **(kwargs or {}))


WITH_STATE = ("int8", "int4", "powersgd:4", "powersgd:16:int8")


def count_sent(rank, names, per_node, round_trip_ms):
    """Return by hook what a rank sends in a DDP step, and what is predicted: messages, all-reduces, bytes."""
    os.environ["GRADCOMP_ROUND_TRIP_MS"] = str(round_trip_ms)
    counted, predicted, size = {}, {}, dist.get_world_size()
    on_link = {"by_messages": True, "has_delay": round_trip_ms >= 5}
    for name in names:
        # The last layers' tensors are sent exactly by PowerSGD: 280 kB each.
        widths = (300, 200, 700, 130, 1, 70_000)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
        register(ddp, name, per_node)
        for _ in range(3):  # buckets are rebuilt, the state compares its ranks
            ddp(torch.randn(2, 300)).sum().backward()
        with SentMeter() as meter:
            ddp(torch.randn(2, 300)).sum().backward()
        counted[name] = (meter.num_messages, meter.num_all_reduces, meter.num_bytes)
        buckets = buckets_of([tuple(each.shape) for each in model.parameters()], cap_bytes=0.3 * 2**20)
        assert len(buckets) > 1
        hook = Candidate.form_named(name)
        payloads = [hook.payload(each.shapes, FP32, size, per_node, **on_link) for each in buckets]
        collectives = [each for payload in payloads for each in payload.collectives]
        sizes = {"all": size, "within": per_node, "between": size // per_node}
        all_reduces = [each for each in collectives if each.kind == "all-reduce"]
        predicted[name] = (
            sum(sizes[each.group] - 1 for each in collectives if each not in all_reduces),
            len(all_reduces),
            sum(sent_bytes(each, size, per_node) for each in collectives),
        )
    return counted, predicted


@pytest.mark.parametrize(
    ("world_size", "per_node", "round_trip_ms"),
    [(2, 1, 0), (2, 1, 20), (4, 1, 0), (4, 1, 20), (4, 2, 0), (4, 2, 20)],
)
def test_hooks_send_the_predicted_messages_and_bytes(run_ranks, world_size, per_node, round_trip_ms):
    names = tuple(CANDIDATES) if world_size == 2 else ("none", "fp16", *WITH_STATE)
    if per_node > 1:
        names = [f"{name} by nodes" for name in WITH_STATE]
    ranks = run_ranks(count_sent, world_size, names, per_node, round_trip_ms)
    for name in names:
        expected = ranks[0][1][name]
        for counted, _ in ranks:
            assert counted[name][:2] == expected[:2], name
        # The last shard may be smaller; the last piece of a node's sum of factors is padded.
        sent = sum(counted[name][2] for counted, _ in ranks) / world_size
        assert sent == pytest.approx(expected[2], rel=1e-9 if per_node == 1 else 1e-5), name


def test_memory_traffic_is_the_documented_one():
    """docs/internals: 12 B per element in 16 bits, 18.5 at 4 bits on 8 ranks; 20 B for PowerSGD."""
    matrix = [(8192, 8192)]

    def per_element(name, world_size=8):
        return CANDIDATES[name].payload(matrix, FP32, world_size).moved_bytes / 8192**2

    assert per_element("none") == 0
    assert per_element("fp16") == 12
    assert per_element("int4") == pytest.approx(18.5, abs=0.05)
    assert per_element("powersgd:1") == pytest.approx(20, rel=0.01)
    assert per_element("powersgd:16") > per_element("powersgd:1")
    assert per_element("powersgd:1:int8") > per_element("powersgd:1")


@pytest.mark.parametrize("name", CANDIDATES)
def test_awkward_buckets(name):
    candidate = CANDIDATES[name]
    for shapes in ([], [(1,)], [(1, 1)], [()], SHAPES):
        for world_size in (1, 2, 7):
            payload = candidate.payload(shapes, FP32, world_size)
            assert payload.moved_bytes >= 0
            assert all(each.num_bytes >= 0 for each in payload.collectives)


def test_names():
    for name in CANDIDATES:
        assert candidate_named(name) == CANDIDATES[name]
    assert candidate_named("powersgd:32:int8") == Candidate(
        "powersgd:32:int8", rank=32, wire_dtype=torch.int8
    )
    for wrong in ("", "int2", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:4:int4", "int4:256"):
        with pytest.raises(ValueError, match=r"there is no hook .* known are none"):
            candidate_named(wrong)


def test_costs_are_those_of_the_page():
    page = (ROOT / "docs" / "accuracy.md").read_text()
    gpt = page[page.index("\ngpt: ") :].partition("\n\n")[0]
    row = re.compile(r"^(\S+) +[\d,]+ +([\d.]+)× .*? ([+-]\d\.\d{3}) ±", re.MULTILINE)
    on_page = {name: (float(nats), float(rate)) for name, rate, nats in row.findall(gpt)}
    costs = {name: (cost.nats, cost.rate) for name, cost in MEASURED.items() if name != "none"}
    assert costs == {name: on_page[name] for name in costs}
    assert costs.keys() >= on_page.keys() - {"int4:64"}


def test_costs_of_hooks_that_were_not_measured():
    assert accuracy_cost(CANDIDATES["powersgd:16:bf16"]).nats == MEASURED["powersgd:16:int8"].nats
    assert "int8" in accuracy_cost(CANDIDATES["powersgd:16:bf16"]).note
    assert accuracy_cost(CANDIDATES["powersgd:1:int8"]).note == "2 ranks, fp32 factors"
    assert accuracy_cost(candidate_named("powersgd:32")) is None
    assert all(accuracy_cost(candidate) is not None for candidate in CANDIDATES.values())


def test_bert_is_compressed_as_documented():
    """docs/choosing.md: 16 bits half, int4 7.8 times fewer at most, PowerSGD hundreds of times."""
    buckets = buckets_of(built_in_model("bert-large").parameters)
    total = {
        name: sum(candidate.payload(bucket.shapes, FP32, 64).collective_bytes for bucket in buckets)
        for name, candidate in CANDIDATES.items()
    }
    assert total["none"] == 2 * total["bf16"] == 4 * 335_141_888
    assert 7.5 < total["none"] / total["int4"] < 7.8
    assert total["none"] / total["powersgd:1:int8"] > 500
