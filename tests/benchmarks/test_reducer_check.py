"""Test the check of the Reducer, the wrapper and average_, without a GPU."""

import argparse

import pytest
import torch

from benchmarks import rank_devices, reducer_check
from benchmarks.rank_results import Results, judge
from tests.programs import run_module

COMMAND = ("benchmarks.reducer_check", "--device", "cpu")


BROKEN = """
from unittest.mock import patch

import torch
import torch.distributed as dist

import gradcomp
from benchmarks import reducer_scenarios, state_scenarios
from gradcomp.parallel.distributed import DistributedDataParallel
from gradcomp.reducer import averaging, bucket, usage

def scaled(device, rank, world_size):
    fill = bucket.Bucket.fill
    with patch.object(bucket.Bucket, "fill", lambda self, scale: fill(self, 1.01 * scale)):
        return reducer_scenarios.accumulation(device, rank, world_size, "Reducer")

def zeroed(device, rank, world_size):
    with patch.object(usage.FindUnused, "unused_by_all_ranks", lambda self: set()):
        return reducer_scenarios.unused_parameters(device, rank, world_size, "wrapper")

def replicas_differ(device, rank, world_size):
    write_back = bucket.Bucket.write_back
    def uneven(self, left_out):
        self.buffer.mul_(1 + 2e-7 * rank)
        write_back(self, left_out)
    with patch.object(bucket.Bucket, "write_back", uneven):
        return reducer_scenarios.bucket_views(device, rank, world_size, "Reducer")

def buffers_differ(device, rank, world_size):
    def not_on_rank_1(self, buffers, src):
        kept = [buffer.clone() for buffer in buffers]
        self._broadcast_buffers(buffers, src, self.process_group)
        if rank:
            torch._foreach_copy_(buffers, kept)
    with patch.object(DistributedDataParallel, "sync_buffers", not_on_rank_1):
        return state_scenarios.module_state(device, rank, world_size)

def other_strides(device, rank, world_size):
    like = lambda part, parameter: part.view(parameter.shape)
    with patch.object(bucket, "_like", like):
        return reducer_scenarios.channels_last(device, rank, world_size, "Reducer")

def loses_rows(device, rank, world_size):
    gather = averaging._gather
    with patch.object(averaging, "_gather", lambda mine, longest, lengths, group: gather(
            mine[: min(lengths)], min(lengths), [min(lengths)] * world_size, group)):
        return reducer_scenarios.sparse_gradients(device, rank, world_size, "wrapper")

def forgets_errors(device, rank, world_size):
    save, loaded = state_scenarios._WAYS["state_dict"]
    def without_errors(saved, hook_check):
        state = loaded(saved, hook_check)
        state_dict = state.state_dict()
        for memory in state_dict["buckets"].values():
            memory["error"].zero_()
        state.load_state_dict(state_dict)
        return state
    with patch.dict(state_scenarios._WAYS, {"state_dict": (save, without_errors)}):
        return state_scenarios.checkpoints(device, rank, world_size, "Reducer")

def writes_between(device, rank, world_size):
    average_ = gradcomp.average_
    def averaging(tensors, *arguments, **options):
        average_(tensors, *arguments, **options)
        for tensor in tensors:
            if tensor.dim() and tensor.stride(0) == 14:
                tensor.as_strided((7,), (1,), 7).zero_()
        return tensors
    with patch.object(gradcomp, "average_", averaging):
        return state_scenarios.average_exactly(device, rank, world_size)

def wrong_divisor(device, rank, world_size):
    prepare = gradcomp.Reducer.prepare_for_backward
    def without_divisor(self, outputs, divisor=None):
        prepare(self, outputs)
    with patch.object(gradcomp.Reducer, "prepare_for_backward", without_divisor):
        return reducer_scenarios.join(device, rank, world_size)

def raises(device, rank, world_size):
    if rank == 1:
        raise ZeroDivisionError("on one rank only")
    return reducer_scenarios.accumulation(device, rank, world_size, "Reducer")
"""

PLANTED = {
    "scaled": "off by",
    "zeroed": "as it was",
    "replicas_differ": "the replicas differ",
    "buffers_differ": "running_mean before",
    "other_strides": "strides",
    "loses_rows": "sparse.weight",
    "forgets_errors": "state_dict, tensor",
    "writes_between": "the rows between",
    "wrong_divisor": "by those left",
    "raises": "on one rank only",
}


AFTERWARDS = "no_sync, Reducer"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """In one run: all scenarios, then scenarios with planted bugs, then a sound scenario."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_reducers.py").write_text(BROKEN)
    names = [*reducer_check.SCENARIOS, *(f"broken_reducers:{name}" for name in PLANTED), AFTERWARDS]
    arguments = [argument for name in names for argument in ("--scenario", name)]
    return run_module(*COMMAND, *arguments, timeout_s=240, PYTHONPATH=str(folder))


def outcomes(output):
    """Return (name, verdict, lines printed below) of every scenario; its name is the line's first column."""
    found = []
    for line in output.splitlines():
        name, verdict = line[:36].strip(), line[36:].split()[:1]
        if verdict in (["ok"], ["FAILED"]) and (
            name in reducer_check.SCENARIOS or "broken_reducers:" in name
        ):
            found.append((name, verdict[0], []))
        elif found:
            found[-1][2].append(line)
    return found


def test_every_scenario_passes_on_two_ranks(done):
    sound = [(name, verdict) for name, verdict, _ in outcomes(done.stdout)[: len(reducer_check.SCENARIOS)]]
    assert sound == [(name, "ok") for name in reducer_check.SCENARIOS], done.stdout


def test_planted_bugs_are_found(done):
    assert done.returncode == 1
    broken = outcomes(done.stdout)[len(reducer_check.SCENARIOS) : -1]
    assert [name.partition(":")[2] for name, _, _ in broken] == list(PLANTED), done.stdout
    for (name, verdict, below), problem in zip(broken, PLANTED.values(), strict=True):
        assert verdict == "FAILED", name
        assert problem in "\n".join(below), name


def test_a_scenario_that_breaks_off_does_not_hide_the_next(done):
    assert list(PLANTED)[-1] == "raises"
    assert outcomes(done.stdout)[-1][:2] == (AFTERWARDS, "ok"), done.stdout


def test_scenarios_without_time_left_fail(capsys):
    assert reducer_check.main(["--device", "cpu", "--timeout-s", "0"]) == 1
    output = capsys.readouterr().out
    assert {verdict for _, verdict, _ in outcomes(output)} == {"FAILED"}
    assert output.count("no time left") == len(reducer_check.SCENARIOS)


# --- judging ---


def results_of(*ranks):
    """Return the results of every rank. ranks: one function per rank, called with the rank's Results."""
    noted = []
    for note in ranks:
        results = Results(len(ranks))
        note(results)
        noted.append(results.results)
    return noted


ONE, TWO = torch.ones(3), torch.full((3,), 2.0)
MEAN = (ONE + TWO) / 2
JUDGED = [
    ("mean", [(ONE, MEAN), (TWO, MEAN)], None),
    ("mean", [(None, ONE / 2), (ONE, ONE / 2)], None),
    ("mean", [(None, None), (None, None)], None),
    ("mean", [(ONE, MEAN * 1.001), (TWO, MEAN * 1.001)], "off by"),
    ("mean", [(ONE, MEAN), (TWO, MEAN.nextafter(TWO))], "the replicas differ"),
    ("mean", [(ONE, MEAN * torch.nan), (TWO, MEAN * torch.nan)], "off by nan"),
    ("mean", [(None, ONE * 0), (None, ONE * 0)], "is a tensor, but must be None"),
    ("mean", [(ONE, None), (TWO, MEAN)], "is None, but must be a tensor"),
    ("mean", [(ONE, MEAN.bfloat16()), (TWO, MEAN.bfloat16())], "is torch.bfloat16"),
    ("mean", [(ONE, MEAN[:2]), (TWO, MEAN[:2])], "has shape [2]"),
    ("like", [(ONE, ONE), (TWO, TWO)], "the replicas differ"),
    ("same", [(ONE, ONE), (TWO, TWO)], None),
    ("same", [(ONE, ONE.nextafter(TWO)), (TWO, TWO)], "rank 0: is not exactly"),
    ("rank_0s", [(ONE, ONE), (TWO, ONE)], None),
    ("rank_0s", [(ONE, ONE), (TWO, TWO)], "rank 1: is not exactly"),
]


@pytest.mark.parametrize(("kind", "ranks", "problem"), JUDGED)
def test_results_are_judged(kind, ranks, problem):
    noted = results_of(*(lambda results, pair=pair: getattr(results, kind)("it", *pair) for pair in ranks))
    failures = judge(noted).failures
    assert bool(failures) == (problem is not None)
    assert problem is None or any(problem in failure for failure in failures)


def test_what_was_not_compared_is_no_success():
    assert judge(results_of(lambda results: None)).failures == ["nothing was compared"]
    only_one = results_of(lambda results: results.mean("it", ONE, ONE), lambda results: None)
    assert judge(only_one).failures == ["it: only ranks [0] have it"]
    twice = results_of(lambda results: [results.fact("it", is_so) for is_so in (False, True)])
    assert "noted twice" in judge(twice).failures[0]


# --- devices ---


@pytest.mark.parametrize(
    ("backend", "given", "num_gpus", "expected"),
    [("nccl", None, 4, 4), ("nccl", None, 1, 1), ("nccl", 2, 4, 2), ("gloo", None, 1, 2), ("gloo", 3, 1, 3)],
)
def test_nccl_takes_all_gpus(backend, given, num_gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    args = argparse.Namespace(backend=backend, world_size=given, device="cuda")
    world_size = rank_devices.chosen_world_size(args)
    assert world_size == expected
    devices = [rank_devices.take_device(rank, backend, "cuda") for rank in range(world_size)]
    assert taken == devices
    indices = [device.index for device in devices]
    assert indices == (list(range(world_size)) if backend == "nccl" else [0] * world_size)


@pytest.mark.parametrize(
    ("backend", "given", "device", "num_gpus", "problem"),
    [
        ("nccl", 3, "cuda", 2, "this machine has 2"),
        ("nccl", None, "cpu", 2, "no collectives of CPU tensors"),
        ("gloo", None, "cuda", 0, "no CUDA GPU"),
        ("gloo", 0, "cpu", 0, "is 0"),
    ],
)
def test_ranks_that_the_machine_has_no_gpu_for(backend, given, device, num_gpus, problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=problem):
        rank_devices.chosen_world_size(argparse.Namespace(backend=backend, world_size=given, device=device))
