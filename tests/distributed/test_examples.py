"""The documentation's examples run as they are."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

GLOO_AT_EXIT = "terminate called without an active exception"


def run(*command, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(EXAMPLES.parents[1]),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    # torch's gloo: a process that has done its work may abort while Python shuts down. Nothing else is let through.
    assert done.returncode == 0 or GLOO_AT_EXIT in done.stderr, done.stderr
    return done.stdout


def test_the_data_parallel_example(tmp_path):
    source = (EXAMPLES / "data_parallel.py").read_text()
    assert source.count("from gradcomp import DistributedDataParallel as DDP") == 1
    run(EXAMPLES / "data_parallel.py", tmp_path=tmp_path)


def test_the_reducers_loop(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*torchrun, EXAMPLES / "reducer_loop.py", tmp_path=tmp_path)
    loss, rate = (float(part.split()[-1]) for part in printed.split(","))
    assert loss < 1.0
    assert rate > 2
