"""Test the demo in tiny real runs: its link, the bytes that it counts, and how it ends after a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import demo
from benchmarks.demo import parse
from benchmarks.records import read
from benchmarks.training.runs import check_replicas
from benchmarks.training.wire import Link, Wire
from gradcomp.comm.consistency import MESSAGE_BYTES
from gradcomp.comm.exchange import all_gather, all_to_all
from tests.depth import everyday
from tests.programs import ROOT, descendants, is_running, refusal, users_environment

TINY = ["--width", "32", "--layers", "1", "--heads", "2", "--batch", "2", "--sequence", "16"]
TIMEOUT_S = 240  # 90 were not enough on a busy machine


@pytest.fixture
def start(tmp_path):
    """Start demos with their output in the file `demo.output`, and kill their processes at the end."""
    started = []

    def start_demo(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "benchmarks.demo", *TINY, "--out", str(tmp_path), *arguments]
        output = tmp_path / "output"
        with output.open("wb") as file:
            demo = subprocess.Popen(
                command, cwd=ROOT, env=users_environment(), stdout=file, stderr=subprocess.STDOUT
            )
        demo.output = output
        started.append(demo)
        return demo

    start_demo.started = started
    yield start_demo
    for each in started:
        for pid in {each.pid, *descendants(each.pid)} if each.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        each.wait()


def wait_for_text(demo: subprocess.Popen, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in (output := demo.output.read_text()):
        if time.monotonic() > deadline:
            pytest.fail(f"no {text!r} in {TIMEOUT_S} s:\n{output}")
        time.sleep(0.05)


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while left := {pid for pid in pids if is_running(pid)}:
        if time.monotonic() > deadline:
            pytest.fail(f"processes {left} outlived the demo")
        time.sleep(0.05)


def ranks_of(demo: subprocess.Popen) -> list[int]:
    """Return the process ids of the training ranks, in the order of their start."""
    pids = sorted(descendants(demo.pid))
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_whole_demo(start, tmp_path):
    hooks = everyday(["powersgd:2:int8"], ["powersgd:2", "powersgd:2:int8", "batched:2"])
    steps, plain = 14, 2
    demo = start("--hook", ",".join(["none", *hooks, "fp16", "auto"]), "--steps", str(steps))
    status, output = demo.wait(timeout=TIMEOUT_S), demo.output.read_text()
    assert status == 0, output
    none, *power_sgds, fp16, auto = read(tmp_path / "demo.jsonl")
    assert f"chose {auto['choice']}" in output
    assert f"none{none['bytes_per_step']:>21,}    1.0×" in output
    assert f"fp16{fp16['bytes_per_step']:>21,}    2.0×" in output
    # Weights: two embeddings, a block (12 width² + 13 width), the last norm, the head; 4 bytes each.
    parameters = 256 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32 + 256 * 32
    assert output.startswith("Training a small GPT on 2 ranks, over 200 Mbit/s with 10 ms each way\n")
    assert none["bytes_per_step"] == 4 * parameters
    assert min(none["step_s"]) >= 4 * parameters / 25e6 + 2 * 0.01
    assert none["losses"][-1] < none["losses"][0]
    assert len(none["losses"]) == len(none["step_bytes"]) == steps
    assert none["validation_losses"][-1] == [steps, none["validation_loss"]]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for each in (fp16, *power_sgds):
        assert each["losses"][0] == none["losses"][0], "not the same weights and data"
    for index, power_sgd in enumerate(power_sgds):
        # Options and nodes; the links' delay once per group.
        compared = 2 * MESSAGE_BYTES + 8 * (index == 0)
        assert power_sgd["step_bytes"][:plain] == [
            none["step_bytes"][0] + compared,
            *none["step_bytes"][1:plain],
        ]
        assert power_sgd["step_bytes"][plain:] == [power_sgd["bytes_per_step"]] * (steps - plain)
        assert power_sgd["bytes_per_step"] < none["bytes_per_step"] / 2
        assert power_sgd["losses"][-1] < power_sgd["losses"][0]


def test_a_busy_machine_shows_no_times(start):
    """Other programs, twice as many as there are cores, compute for most of every second."""
    burn = [sys.executable, "-c", "import time\nwhile True: time.time() % 1.1 > 0.8 and time.sleep(0.3)"]
    start.started += [subprocess.Popen(burn) for _ in range(2 * len(os.sched_getaffinity(0)))]
    demo = start("--hook", "none", "--steps", "200", "--link", "none")
    assert demo.wait(timeout=TIMEOUT_S) == 0, demo.output.read_text()
    assert "This machine is too busy to time this: " in demo.output.read_text()


def test_a_signal_to_the_launcher_ends_every_rank(start):
    """The signal goes to the launcher alone, as from `kill`; from a terminal all processes would get it."""
    demo = start("--hook", "none", "--steps", "100000")
    wait_for_text(demo, "step ")
    pids = descendants(demo.pid)
    assert len(ranks_of(demo)) == 2
    demo.send_signal(signal.SIGHUP)
    assert demo.wait(timeout=30) == 128 + signal.SIGHUP
    wait_until_gone(pids)


def test_a_dead_rank_ends_the_demo_with_an_error(start):
    demo = start("--hook", "bf16", "--steps", "100000")
    wait_for_text(demo, "step ")
    pids = descendants(demo.pid)
    os.kill(ranks_of(demo)[1], signal.SIGKILL)
    wait_for_text(demo, "demo: training failed")
    assert demo.wait(timeout=30) == 1
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hook", "fp16,fp8"], "--hook: there is no hook 'fp8'; known are none, allreduce"),
        (["--hook", "none,alone"], "--hook: alone sends nothing to compare"),
        (["--link", "5"], "argument --link: '5' is neither none nor MBIT_PER_S,DELAY_MS, such as 200,10"),
        (["--link", "200,-1"], "argument --link: '200,-1' is neither none nor"),
        (["--link", "inf,0"], "argument --link: 'inf,0' is neither none nor"),
        (["--ranks", "0"], "argument --ranks: '0' is not a whole number of at least 1"),
        (["--heads", "3"], "--width must be a multiple of --heads: got 32 and 3"),
        (["--steps", "9"], "--steps must be at least 10 to time any of them: got 9"),
        (["--seed", "-1"], "--seed must not be negative: got -1"),
        (["--out", "README.md"], "--out: [Errno 17] File exists: 'README.md'"),
    ],
)
def test_bad_options_are_shown(arguments, message, capsys):
    assert message in refusal(capsys, parse, [*TINY, *arguments])


def test_a_busy_machine_gives_no_times():
    record = {"hook": "none", "bytes_per_step": 800, "ms_per_step": 111.0, "choice": None}
    record |= {"validation_loss": 2.5, "validation_losses": [(0, 3.0), (10, 2.5)]}
    record |= {"step_s": [0.2] * 5 + [0.10, 0.11, 0.11, 0.11, 0.12]}
    assert not demo.too_noisy(record)
    why = demo.too_noisy(record | {"step_s": [0.2] * 5 + [0.10, 0.10, 0.11, 0.13, 0.14]})
    assert why == "of the steps of none a fifth took under 100 ms, a fifth over 138"
    in_time, busy = demo.table([record], ""), demo.table([record], why)
    assert (" 111 " in in_time, " 111 " in busy, f"time this: {why}." in busy) == (True, False, True)


def test_the_meter_counts_what_is_handed_to_collectives(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with Wire() as wire:
            dist.all_reduce(torch.zeros(1000))
            dist.all_reduce(torch.zeros(10, dtype=torch.float16), async_op=True).wait()
        dist.all_reduce(torch.zeros(5))
        assert wire.num_bytes == 4020
    finally:
        dist.destroy_process_group()


def metered(rank, world_size):
    """Send an all-to-all and an all-gather of 120 bytes as messages; return the counted bytes."""
    rows = torch.zeros(world_size, 120 // world_size, dtype=torch.uint8)
    with Wire() as wire:
        all_to_all(torch.empty_like(rows), rows, dist.group.WORLD).wait()
        all_gather(torch.empty_like(rows), rows[0], dist.group.WORLD).wait()
    return wire.num_bytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_count_as_the_collectives_that_they_make(run_ranks, world_size):
    """An all-to-all and an all-gather each count as half of an all-reduce of 120 bytes."""
    assert run_ranks(metered, world_size, world_size) == [120] * world_size


def test_bytes_follow_one_another_and_delays_overlap():
    link = Link(mbit_per_s=8, delay_ms=10)  # 1 MB/s
    assert link.arrival(1000, 2, now=5.0) == pytest.approx(5.021)
    assert link.arrival(2000, 2, now=5.0) == pytest.approx(5.023)
    assert link.arrival(0, 1, now=5.0) == pytest.approx(5.023)  # not before what was sent before it
    assert link.arrival(1000, 1, now=6.0) == pytest.approx(6.011)


def check_an_emulated_link(rank):
    group, tensors = dist.group.WORLD, [torch.full((25_000,), rank + 1.0) for _ in range(2)]
    with Wire(Link(mbit_per_s=80, delay_ms=20)):  # 100 kB take 10 ms
        begun = time.monotonic()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for number, work in enumerate(works, 1):
            work.wait()
            assert time.monotonic() - begun >= 0.0099 * number + 2 * 0.02
        assert all((tensor == 3).all() for tensor in tensors)

        begun = time.monotonic()
        received, sent = torch.empty(2, 25_000), torch.full((2, 25_000), float(rank))
        all_to_all(received, sent, group).wait()
        assert time.monotonic() - begun >= 0.0099 + 0.02
        assert received[:, 0].tolist() == [0, 1]

    with pytest.raises(RuntimeError, match="BAND"), Wire(Link(mbit_per_s=80, delay_ms=20)):
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.BAND)


def test_an_emulated_link_delays_but_changes_nothing(run_ranks):
    """gloo gets collectives and messages when their bytes would have arrived. Its errors are raised."""
    run_ranks(check_an_emulated_link, 2)


def check_different_replicas(rank):
    check_replicas([torch.ones(3), torch.zeros(2)])
    with pytest.raises(RuntimeError, match="1 of 5 parameters differ between the ranks"):
        check_replicas([torch.ones(3), torch.tensor([0.0, rank * 1e-8])])


def test_replicas_that_differ_are_found(run_ranks):
    run_ranks(check_different_replicas, 2)
