"""Test the stream that hooks' work runs on, with CUDA stubbed in another process."""

import json

from tests.programs import needs_stub_cuda, run_python

PROGRAM = """
import json
from benchmarks import stub_cuda

stub_cuda.install()
import torch
from gradcomp.comm.streams import on_side_stream, side_stream

device = torch.device("cuda", 0)
side = side_stream(device)
found = {"priority": side.priority, "side": side.cuda_stream}


def current():
    return torch.cuda.current_stream(device).cuda_stream


def fails():
    raise ValueError


found["before"] = current()
for index in (0, 1):
    torch.cuda.current_device = lambda: index
    found[f"during {index}"] = on_side_stream(device, current)
    found[f"after {index}"] = current()
    try:
        on_side_stream(device, fails)
    except ValueError:
        found[f"after an error {index}"] = current()
print(json.dumps(found))
"""


@needs_stub_cuda
def test_work_runs_on_the_side_stream_and_leaves_the_current_one():
    done = run_python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["priority"] < 0
    assert found["side"] != found["before"]
    for index in (0, 1):  # index: the current device
        assert found[f"during {index}"] == found["side"]
        assert found[f"after {index}"] == found[f"after an error {index}"] == found["before"]
