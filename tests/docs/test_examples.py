"""Run the documentation's examples as they are, and check that their processes end in order."""

import json

import pytest

from tests.programs import ROOT, TORCHRUN, run_python

EXAMPLES = ROOT / "docs" / "examples"

# Run a script, then look for gloo's threads: a thread that is left may abort the process while Python shuts
# down. Without automatic collections, objects in a cycle stay until the script collects them.
WATCHED = """
import gc, pathlib, runpy, sys
gc.disable()
runpy.run_path(sys.argv[1], run_name="__main__")
threads = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in threads), f"left behind: {threads}"
"""


def run(*command, tmp_path):
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_python(*command, timeout_s=300, **environment)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    return done.stdout


def test_the_data_parallel_example(tmp_path):
    source = (EXAMPLES / "data_parallel.py").read_text()
    assert source.count("from gradcomp import DistributedDataParallel as DDP") == 1
    run(EXAMPLES / "data_parallel.py", tmp_path=tmp_path)


def test_the_reducers_loop(tmp_path):
    watched = tmp_path / "watched.py"
    watched.write_text(WATCHED)
    printed = run(*TORCHRUN, watched, EXAMPLES / "reducer_loop.py", tmp_path=tmp_path)
    loss, rate = (float(part.split()[-1]) for part in printed.split(","))
    assert loss < 1.0
    assert rate > 2


def test_the_checkpoint_example_where_there_is_no_numpy(tmp_path):
    """The example loads one file on another number of ranks, with only what gradcomp requires."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is no numpy')")
    printed = run(EXAMPLES / "checkpoint.py", tmp_path=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in printed] == [
        "world size 2, step 100",
        "world size 1, step 200",
    ]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in printed]
    assert losses[1] < 0.6 * losses[0]


def test_the_example_of_sharded_replicas(tmp_path):
    printed = run(EXAMPLES / "fsdp.py", tmp_path=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in printed] == ["step 40", "step 80"]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in printed]
    assert losses[1] < 0.7 * losses[0]
    assert all(float(line.split()[-1]) > 4 for line in printed)


# Values that the examples log. In the last of 60 steps PowerSGD's bucket saves 10 times, 4 bits 7 times.
LOGGED = (
    "gradcomp/rate",
    "gradcomp/relative_error",
    "gradcomp/bucket 0/energy_kept",
    "gradcomp/bucket 0/time_ms",
)


def test_the_example_that_records(tmp_path):
    path = tmp_path / "recording.json"
    run(EXAMPLES / "record.py", path, tmp_path=tmp_path)
    rows = json.loads(path.read_text())
    assert {row["step"] for row in rows} == set(range(300))
    assert all(row["relative_error"] is not None for row in rows)


def test_the_example_that_logs_to_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(EXAMPLES / "log_to_tensorboard.py", tmp_path / "runs", tmp_path=tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(LOGGED) <= set(events.Tags()["scalars"])
    for name in LOGGED[:2]:
        assert [event.step for event in events.Scalars(name)] == list(range(60))
    assert [event.value for event in events.Scalars("gradcomp/rate")[:10]] == [1.0] * 10
    assert events.Scalars("gradcomp/rate")[-1].value > 5
    assert 0 < events.Scalars("gradcomp/relative_error")[-1].value < 1


def test_the_example_that_logs_to_weights_and_biases(tmp_path):
    pytest.importorskip("wandb")
    run(EXAMPLES / "wandb_offline.py", tmp_path, tmp_path=tmp_path)
    (logged,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = logged.read_bytes()
    for name in LOGGED:
        assert content.count(name.encode()) >= 60, name
