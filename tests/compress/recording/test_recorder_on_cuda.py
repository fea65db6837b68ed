"""With CUDA stubbed, test that a recorder computes on the side stream, and that no step waits for it."""

from tests.programs import found_by, needs_stub_cuda

PROGRAM = """
import json
from benchmarks import stub_cuda

stub_cuda.install()
import torch
import torch.distributed as dist
from gradcomp.compress import Compressor, CompressorState, Recorder, compress_hook
from gradcomp.compress import recording as module
from gradcomp.comm.streams import side_stream
from gradcomp.comm.bucket import GradBucket

log, waits = [], []

class Event:
    def __init__(self, enable_timing=False):
        if not enable_timing:  # it orders the side stream after gradients
            self.record = self.wait = lambda stream: None
        self.index = len([entry for entry in log if entry[0] == "event"])

    def record(self, stream=None):
        log.append(("event", stream.cuda_stream))

    def synchronize(self):
        waits.append("synchronize")

    def elapsed_time(self, end):
        return 1.5 * (end.index - self.index)


class Halves(Compressor):
    def __init__(self, bucket, options):
        self.kept = torch.zeros(sum(bucket.numels))

    def average(self, flat, group, seed):
        log.append(("average", current()))
        dist.all_reduce(flat, group=group)

    def current_error(self):
        log.append(("error", current()))
        return self.kept

    def state(self):
        return {"error": self.kept.clone()}

    def load(self, state):
        pass


def current():
    return torch.cuda.current_stream(device).cuda_stream


def measured(values, shift, *, out):
    log.append(("measure", current()))
    return original(values, shift, out=out)


def waiting(name):
    function = getattr(torch.Tensor, name)

    def called(tensor, *arguments):
        waits.append(name)
        return function(tensor, *arguments)

    setattr(torch.Tensor, name, called)


device = torch.device("cuda", 0)
torch.cuda.Event = Event
original, module.measure = module.measure, measured
state = CompressorState(Halves)
recording = Recorder(state)
parameters = [torch.ones(600)]
for step in range(5):
    if step == 3:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
            waiting(name)
        log.clear()
    compress_hook(state, GradBucket(0, torch.ones(600), parameters, True)).wait()
    if step == 3:
        found = {"log": list(log)}
found |= {"waits in steps": list(waits), "side": side_stream(device).cuda_stream, "current": current()}
times = [row["time_ms"] for row in recording.rows()]
found |= {"waits of rows()": sorted(set(waits)), "times": times}
print(json.dumps(found))
"""


@needs_stub_cuda
def test_everything_is_on_the_side_stream_and_nothing_waits():
    found = found_by("-c", PROGRAM)
    assert found["side"] != found["current"]
    order = ["measure", "event", "average", "event", "measure", "error", "measure", "event"]
    assert found["log"] == [[name, found["side"]] for name in order]
    assert found["waits in steps"] == []
    assert found["waits of rows()"] == ["synchronize", "tolist"]
    # The time is from the first event to the second, though a third event has been recorded since.
    assert found["times"] == [None, None, 1.5, 1.5, 1.5]
