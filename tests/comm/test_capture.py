"""Test that nothing is averaged while a CUDA graph is captured. CUDA's two answers are made up."""

from contextlib import contextmanager

import pytest
import torch

import gradcomp
from gradcomp.comm import all_reduce, bucket, pipeline
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import default_hooks
from gradcomp.reducer import average
from gradcomp.testing import run_ranks
from tests.hooks.checked import HOOKS

pytestmark = pytest.mark.usefixtures("plain_torch")
AVERAGING = [name for name, check in HOOKS.items() if check.averages]


@contextmanager
def captured():
    """Capture the current stream, on a device that has streams."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (all_reduce, bucket, pipeline, gradcomp.device, average, default_hooks):
            patch.setattr(module, "has_streams", lambda device: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured: a replay would") as raised:
            yield raised


def average_with(rank, group, name):
    parameters = [torch.nn.Parameter(torch.zeros(4, 3))]
    check, buffer = HOOKS[name], torch.ones(12)
    state = check.make_state and check.make_state()
    with captured():
        check.make()(state, GradBucket(0, buffer, parameters, True))
    assert torch.equal(buffer, torch.ones(12))


@pytest.mark.parametrize("name", AVERAGING)
def test_hooks_refuse(name):
    run_ranks(average_with, 1, name)


def reduce_and_average(rank, group):
    net = torch.nn.Linear(3, 2)
    reducer = gradcomp.Reducer(net.parameters())
    with captured() as raised:
        net(torch.ones(1, 3)).sum().backward()
    assert str(raised.value).startswith("the Reducer can't average gradients while")
    reducer.close()
    tensor = torch.ones(3)
    with captured() as raised:
        gradcomp.average_([tensor])
    assert str(raised.value).startswith("average_ can't average tensors while")
    assert torch.equal(tensor, torch.ones(3))


def test_the_reducer_and_average_refuse():
    run_ranks(reduce_and_average, 1)
