"""Compare predictions of the bytes that hooks send and move with the hooks and with docs/accuracy.md."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.demo.measure import WireMeter
from gradcomp.compress.accuracy_cost import MEASURED, accuracy_cost
from gradcomp.hooks import default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.plan.candidates import CANDIDATES, Candidate, candidate_named
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


def registered(candidate):
    """Return the library's state and hook for a candidate."""
    if candidate.rank is not None:
        options = {"uncompressed_dtype": torch.bfloat16} if candidate.wire_dtype == torch.int8 else {}
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=candidate.rank,
            start_powerSGD_iter=2,
            factor_dtype=candidate.wire_dtype,
            **options,
        )
        return state, powerSGD_hook.powerSGD_hook
    if candidate.bits is not None:
        state = quantization_hooks.QuantizationState(bits=candidate.bits, start_iter=2)
        return state, quantization_hooks.quantization_hook
    hooks = {
        "none": default_hooks.allreduce_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }
    return None, hooks[candidate.name]


def count_bytes(rank):
    """Return the bytes that a rank hands to collectives in a DDP step with each hook, and the predictions."""
    counted, predicted = {}, {}
    for name, candidate in CANDIDATES.items():
        model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 700), nn.Linear(700, 130))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
        ddp.register_comm_hook(*registered(candidate))
        for _ in range(3):  # buckets are rebuilt, the state compares its ranks
            ddp(torch.randn(2, 300)).sum().backward()
        with WireMeter() as meter:
            ddp(torch.randn(2, 300)).sum().backward()
        counted[name] = meter.num_bytes
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        buckets = buckets_of(shapes, cap_bytes=0.3 * 2**20)
        assert len(buckets) > 1
        payloads = [candidate.payload(bucket.shapes, FP32, dist.get_world_size()) for bucket in buckets]
        predicted[name] = sum(payload.collective_bytes for payload in payloads)
    return counted, predicted


def test_bytes_are_those_that_hooks_hand_to_collectives(run_ranks):
    for counted, predicted in run_ranks(count_bytes, 2):
        assert predicted == counted


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
