"""Train with torchft: replicas whose hook fails, on all of them and on one, and one that dies and joins."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torchft
from torch import nn
from torchft.manager import ReconfigureOptions
from torchft.process_group import ProcessGroupDummy

import gradcomp.frameworks.torchft
from gradcomp.comm.pipeline import average_in_stages
from gradcomp.comm.process_group import Explaining
from gradcomp.comm.streams import completed
from gradcomp.frameworks.torchft import DistributedDataParallel, group_of_quorum
from gradcomp.hooks.default_hooks import allreduce_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.frameworks.recipes import LINE, run
from tests.programs import ROOT

PROGRAM = ROOT / "tests/frameworks/torchft_replicas.py"


def results(kind, tmp_path):
    path = tmp_path / "results.pt"
    run(PROGRAM, kind, path, folder=tmp_path, RUST_LOG="error")
    return torch.load(path)


@pytest.fixture(scope="module")
def on_ddp(tmp_path_factory):
    return results("ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("hook", ["int4", "PowerSGD int8"])
def test_no_step_and_no_error_is_lost_when_replicas_fail_die_and_join(hook, on_ddp):
    died, *replicas = on_ddp[hook]
    first, second, joined = replicas
    num_steps = first["iter"]
    assert [each["iter"] for each in replicas] == [num_steps] * 3
    assert first["committed"] == [*range(num_steps)]
    assert second["committed"] == [step for step in range(num_steps) if step != 4]  # it failed alone
    assert joined["committed"][-5:] == [*range(num_steps - 5, num_steps)]
    assert (first["refused"], second["refused"], joined["refused"]) == ([3, 6], [3, 4, 6], [])
    for each in replicas:
        assert all(map(torch.equal, each["weights"], first["weights"]))
    for index, given in enumerate(first["given"]):
        got, owed = (sum(each[name][index] for each in (died, *replicas)) for name in ("got", "owed"))
        # Gradients and averages are in fp32, sums in fp64.
        assert (got - given - owed).norm() < 1e-6 * got.norm()
        assert (got - given).norm() > 1e-4 * got.norm() or given.ndim == 1


def test_local_steps_and_a_reducer_on_a_quorums_group(tmp_path):
    _, *replicas = results("local_steps", tmp_path)
    for each in replicas:
        assert each["iter"] == replicas[0]["iter"] > 8
        assert all(map(torch.equal, each["weights"], replicas[0]["weights"]))


def test_the_example(tmp_path):
    for printed in results("example", tmp_path):
        [[step, first, last, rate]] = LINE.findall(printed)
        assert (int(step), float(last) < 0.3 * float(first), float(rate) > 7) == (50, True, True)


def test_another_group_than_gloos_is_refused():
    message = "takes the Manager's ProcessGroupGloo as its pg, got .*ProcessGroupDummy"
    with pytest.raises(TypeError, match=f"DistributedDataParallel {message}"):
        DistributedDataParallel(None, ProcessGroupDummy(0, 1), nn.Linear(2, 2), None, allreduce_hook)
    with pytest.raises(TypeError, match=f"group_of_quorum {message}"):
        group_of_quorum(None, ProcessGroupDummy(0, 1))


def test_a_quorum_without_a_group_is_explained():
    manager = SimpleNamespace(wait_quorum=lambda: None, errored=lambda: "no route to host")
    with pytest.raises(RuntimeError, match=r"no process group after the quorum.* no route to host"):
        group_of_quorum(manager, torchft.ProcessGroupGloo())


class ManagerOfOne:
    """A Manager of this process alone, whose group each reconfiguration replaces."""

    def __init__(self, pg):
        self.pg, self.step, self.error, self.quorums = pg, 0, None, 0

    def reconfigure(self):
        self.quorums, self.error = self.quorums + 1, None
        options = ReconfigureOptions()
        options.uuid, options.timeout = self.quorums, timedelta(seconds=20)
        options.handles = [self.pg.get_reconfigure_handle()]
        self.pg.reconfigure(options).wait()

    def wait_quorum(self):
        pass

    def errored(self):
        return self.error

    def current_step(self):
        return self.step

    def is_participating(self):
        return True

    def num_participants(self):
        return 1

    def report_error(self, error):
        self.error = error


def test_a_committed_step_stays_though_the_next_quorum_fails_first(monkeypatch):
    pg = torchft.ProcessGroupGloo(timeout=timedelta(seconds=20))
    manager, state = ManagerOfOne(pg), QuantizationState(bits=4)
    manager.reconfigure()
    ddp = DistributedDataParallel(manager, pg, nn.Linear(64, 64), state, quantization_hook)

    def backward():
        ddp(torch.randn(8, 64)).square().sum().backward()

    for _ in range(3):
        backward()
        manager.step += 1
    manager.reconfigure()
    with monkeypatch.context() as patched:
        patched.setattr(gradcomp.frameworks.torchft, "furthest", lambda *_: 1 / 0)
        backward()
    assert isinstance(manager.error, ZeroDivisionError)
    assert state.iter == 3
    manager.reconfigure()
    backward()
    assert state.iter == 4
    pg.shutdown()


@pytest.mark.parametrize("raises_at", [0, 1, None])
def test_no_error_of_a_bucket_under_way_ends_backward(raises_at):
    """The last bucket has another hook."""
    pg, ran = torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)), []
    manager = ManagerOfOne(pg)
    manager.reconfigure()

    def stages():
        yield None
        ran.append("the second stage")
        raise OSError("a peer has died")

    def hook(_, bucket):
        if bucket.index() == 0:
            averaged = average_in_stages(bucket, stages(), Explaining("average", 0, 1))
        else:
            averaged = completed(bucket.buffer().device, bucket.buffer())
        return 1 / 0 if bucket.index() == raises_at else averaged

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(manager, pg, model, None, hook, bucket_cap_mb=0.01)
    ddp(torch.randn(8, 64)).square().sum().backward()
    assert type(manager.error) is (OSError if raises_at is None else ZeroDivisionError)
    assert ran == (["the second stage"] if raises_at is None else [])
    pg.shutdown()
