"""Recorders on real gloo ranks: with every way to train, and with steps that leave layers out."""

import json

import pytest
import torch
from torch import nn

import gradcomp
from gradcomp.compress import CompressorState, Recorder, compress_hook
from gradcomp.compress.all_reduced import AllReducedCompressor, AllReducedOptions
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.fsdp.models import RANKS, batch_of, new_grid, sharded, weights
from tests.training import WAYS, Averaged, Layers, parameters_of
from tests.training import train as train_on

SIZE, STEPS = 40, 10
STATES = {
    "PowerSGD": (lambda: PowerSGDState(None, 4, 3, min_compression_rate=1), powerSGD_hook),
    "int4": (lambda: QuantizationState(bits=4, start_iter=3), quantization_hook),
}


SIZES = [SIZE] * 4  # of three layers


def skipped(step):
    """Return the layers that a step leaves out: the second one in even steps."""
    return () if step % 2 else (1,)


def train(rank, name, way, is_recorded):
    """Train in one of WAYS; return the recorder's rows and the parameters at the end."""
    torch.manual_seed(0)
    make_state, hook = STATES[name]
    state = make_state()
    recorder = Recorder(state) if is_recorded else None
    options = {} if way == "average_" else {"find_unused_parameters": True, "bucket_cap_mb": 0.01}
    model, data = Averaged(Layers(*SIZES), way, hook, state, **options), torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        if way == "average_":  # which takes every gradient
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(8, SIZE, generator=data)
        if way != "average_" and step % 3 == 0:
            with model.no_sync():
                model(x, skipped(step)).square().mean().backward()
        model.backward((model(x, skipped(step)) - x).square().mean())
        optimizer.step()
    if recorder is not None:
        recorder.complete()
    return recorder.rows() if recorder else [], parameters_of(model)


def all_ways(rank, name):
    return [[train(rank, name, way, is_recorded) for is_recorded in (False, True)] for way in WAYS]


@pytest.mark.parametrize("name", STATES)
def test_every_way_to_train(run_ranks, name):
    for way, one, other in zip(WAYS, *run_ranks(all_ways, 2, name), strict=True):
        for (_, without), (rows, recorded) in (one, other):
            assert torch.equal(without, recorded), way
            assert {row["step"] for row in rows} == set(range(STEPS)), way
            assert [row["compressed"] for row in rows] == [row["step"] >= 3 for row in rows], way
        assert torch.equal(one[0][1], other[0][1]), way
        for ours, theirs in zip(one[1][0], other[1][0], strict=True):
            for shared in ("step", "bucket", "rate", "average_norm", "relative_error", "mean_norm"):
                assert ours[shared] == theirs[shared], (way, shared)
            assert (ours["rank"], theirs["rank"]) == (0, 1)
            if ours["compressed"]:
                assert 0 < ours["relative_error"] < 2, way
                assert ours["time_ms"] > 0


def sharded_replicas(rank):
    """Return the rows and the weights of a model sharded by FSDP2, with and without a recorder."""
    grid, results = new_grid(), []
    for is_recorded in (False, True):
        state = PowerSGDState(None, 2, 2, min_compression_rate=1)
        torch.manual_seed(0)
        model = sharded(grid.shards)
        compress_replicas(model, grid.replicas, state)
        recorder = Recorder(state) if is_recorded else None
        train_on(model, lambda each, number: each(batch_of(rank, number)).square().mean(), range(6), lr=0.02)
        if recorder is not None:
            recorder.complete()
        results.append((recorder.rows() if recorder else [], weights(model)))
    return results


def test_replicas_that_fsdp2_shards(run_ranks):
    ranks = run_ranks(sharded_replicas, RANKS)
    for (_, without), (rows, recorded) in ranks:
        assert all(map(torch.equal, without, recorded))
        assert {row["step"] for row in rows} == set(range(6))
        assert all(row["relative_error"] is not None for row in rows)
    for shard in (0, 1):  # ranks shard and shard + 2 are replicas of each other
        ours, theirs = (ranks[rank][1][0] for rank in (shard, shard + 2))
        assert [row["rank"] for row in ours] == [0] * len(ours)
        assert [row["rank"] for row in theirs] == [1] * len(theirs)
        assert [row["relative_error"] for row in ours] == [row["relative_error"] for row in theirs]


def logged(rank):
    """Return the rows as JSON, and the arguments of flush's calls to a logger."""
    torch.manual_seed(0)
    model, state = Layers(*SIZES), STATES["PowerSGD"][0]()
    ddp = gradcomp.DistributedDataParallel(model, bucket_cap_mb=0.01, find_unused_parameters=True)
    ddp.register_comm_hook(state, powerSGD_hook)
    recorder, calls = Recorder(state), []
    data = torch.Generator().manual_seed(rank)
    for step in range(12):
        ddp(torch.randn(8, SIZE, generator=data), skipped(step)).square().mean().backward()
        if step == 7:
            recorder.flush(lambda *values: None)
    recorder.complete()
    expected = json.dumps(recorder.rows(), allow_nan=False)
    recorder.flush(lambda *values: calls.append(values))
    assert recorder.rows() == []
    return expected, calls


def test_what_a_logger_and_a_file_get(run_ranks):
    written, calls = run_ranks(logged, 2)[0]
    expected = json.loads(written)
    assert [step for step, _ in calls] == [8, 9, 10, 11]
    for step, values in calls:
        buckets = [row for row in expected if row["step"] == step]
        assert values["gradcomp/sent_bytes"] == sum(row["sent_bytes"] for row in buckets)
        # The parameters' 4,920 elements, in the hook's buckets.
        assert values["gradcomp/gradient_bytes"] == 4 * 4920
        assert len(buckets) > 1
        squares = [(row["mean_norm"] ** 2, row["relative_error"] ** 2) for row in buckets]
        whole = (sum(m * r for m, r in squares) / sum(m for m, _ in squares)) ** 0.5
        assert abs(values["gradcomp/relative_error"] - whole) < 1e-9
        for row in buckets:
            assert values[f"gradcomp/bucket {row['bucket']}/relative_error"] == row["relative_error"]
        assert all(isinstance(value, int | float) for value in values.values())


def in_ddp(model, state, hook, **options):
    state.number_parameters(model.named_parameters())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, Recorder(state)


def take_steps(ddp, steps, used=lambda step: 1):
    """used(step): whether this rank uses the second layer."""
    for step in steps:
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
        ddp(x, skipped(used(step))).square().mean().backward()
        ddp.zero_grad()


def completed(recorder):
    recorder.complete()
    return recorder.rows()


def after_int4(rank, candidates):
    """auto_hook uses the last candidate after int4. Rank 1 doesn't use the second layer from there on."""
    state = AutoState(candidates=candidates, start_iter=2, steps_per_turn=3, rounds=1, clock=lambda: 7.0)
    ddp, recorder = in_ddp(Layers(*SIZES), state, auto_hook, find_unused_parameters=True)
    first = 2 + 3 * len(candidates)  # its second round
    take_steps(ddp, range(first), lambda step: rank == 0 or step < 5)
    return completed(recorder)


def owing(rank):
    """Send loaded errors in bf16, the second layer's only on rank 0, which uses it."""
    model, state = Layers(*SIZES), CompressorState(AllReducedCompressor, AllReducedOptions(torch.bfloat16))
    owed = {name: {"error": torch.ones_like(each)} for name, each in model.named_parameters()}
    state.load_state_dict({**state.state_dict(), "parameters": owed, "num_parameters": len(owed)})
    ddp, recorder = in_ddp(model, state, compress_hook, find_unused_parameters=True)
    take_steps(ddp, range(5), lambda step: 1 - rank)
    return completed(recorder)


def joining(rank):
    """Rank 2 has no batches left after five steps."""
    ddp, recorder = in_ddp(Layers(*SIZES), QuantizationState(bits=4), quantization_hook)
    with ddp.join():
        take_steps(ddp, range(5 if rank == 2 else 7))
    return completed(recorder)


def skipping(rank):
    """No rank uses the second layer in even steps, rank 0 alone in odd ones."""
    state = PowerSGDState(None, 2, 2, min_compression_rate=1)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = gradcomp.DistributedDataParallel(Layers(*SIZES), bucket_cap_mb=0.003, **options)
    ddp.register_comm_hook(state, powerSGD_hook)
    recorder = Recorder(state)
    take_steps(ddp, range(6), lambda step: step % 2 and rank == 0)
    return completed(recorder)


def on_fewer_ranks(rank):
    """Rank 2 leaves after four steps."""
    group = torch.distributed.new_group([0, 1])
    model, state = Layers(*SIZES), QuantizationState(bits=4)
    ddp, recorder = in_ddp(model, state, quantization_hook)
    take_steps(ddp, range(4))
    if rank == 2:
        return []
    model.zero_grad()
    state.process_group = group
    gradients = [torch.randn(40, 40, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    for _ in range(3):
        gradcomp.average_([each.clone() for each in gradients], quantization_hook, state)
    return completed(recorder)


def odd_rows(rank):
    return {
        "none after int4": after_int4(rank, ("int4", "none")),
        "bf16 after int4": after_int4(rank, ("int4", "bf16")),
        "owing": owing(rank),
        "joining": joining(rank),
        "skipping": skipping(rank),
        "on fewer ranks": on_fewer_ranks(rank),
    }


SHARED = ("step", "bucket", "compressed", "relative_error", "mean_norm")


def test_rows_are_alike_on_ranks_that_differ(run_ranks):
    ranks = run_ranks(odd_rows, 3)
    for name, rows in ranks[0].items():
        for other in ranks[1:2] if name == "on fewer ranks" else ranks[1:]:
            assert [[row[key] for key in SHARED] for row in rows] == [
                [row[key] for key in SHARED] for row in other[name]
            ], name
    none, bf16, owed = (ranks[0][name] for name in ("none after int4", "bf16 after int4", "owing"))
    assert {row["relative_error"] for row in none if row["step"] >= 5} == {0.0}
    assert {row["compressed"] for row in none if row["step"] >= 5} == {False}
    for row in [*(row for row in bf16 if row["step"] >= 5), *(row for row in owed if row["step"] >= 2)]:
        assert 0 < row["relative_error"] < 2**-7, "rounding to bf16, of gradients and errors that are sent"
    assert {row["step"] for row in ranks[0]["joining"]} == set(range(7))
    skipped = [row["step"] for row in ranks[0]["skipping"]]
    assert skipped.count(2) == skipped.count(4) < skipped.count(3) == skipped.count(5)
    for row in ranks[0]["on fewer ranks"]:
        assert (row["relative_error"] is not None) == (row["step"] >= 4 or not row["compressed"])
        assert row["relative_error"] is None or row["relative_error"] < 0.5
