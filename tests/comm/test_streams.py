"""Test the stream that hooks' work runs on, with CUDA stubbed in another process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from gradcomp.comm.streams import side_stream
from tests.programs import found_by, needs_stub_cuda

PROGRAM = """
import json
from benchmarks import stub_cuda

stub_cuda.install()
import torch
import gradcomp.device
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
    gradcomp.device._current_device = lambda: index
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
    found = found_by("-c", PROGRAM)
    assert found["priority"] < 0
    assert found["side"] != found["before"]
    for index in (0, 1):  # index: the current device
        assert found[f"during {index}"] == found["side"]
        assert found[f"after {index}"] == found[f"after an error {index}"] == found["before"]


def test_two_threads_at_once_get_one_stream(monkeypatch):
    both_are_here = threading.Barrier(2)

    def make_stream(device, priority):
        with suppress(threading.BrokenBarrierError):  # with a lock, only one thread comes here
            both_are_here.wait(timeout=1)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    device = torch.device("cuda", 99)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(side_stream, [device, device])
    assert one is other is side_stream(device)
