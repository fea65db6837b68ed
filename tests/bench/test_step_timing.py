"""Test how many steps bench times, with a clock that the test moves."""

from types import SimpleNamespace

import pytest
import torch

from gradcomp.bench import steps as step_timing
from gradcomp.bench.workloads import load_workload

HOST_S, DEVICE_S, LIMIT_S = 0.001, 0.1, 1.0


class QueuedTrainer(step_timing.Trainer):
    """A trainer with steps that take HOST_S on the host, and queue DEVICE_S on a device."""

    now_s = queued_s = 0.0
    num_steps = 0

    def step(self, model):
        self.num_steps += 1
        self.now_s += HOST_S
        self.queued_s += DEVICE_S

    def wait(self, device):
        self.now_s, self.queued_s = self.now_s + self.queued_s, 0.0


@pytest.fixture
def trainer(monkeypatch):
    group = SimpleNamespace(device=torch.device("cpu"), slowest=list)
    trainer = QueuedTrainer(load_workload("tests.bench.benchmarked:tiny", group.device), group, 25.0)
    monkeypatch.setattr(step_timing, "synchronize", trainer.wait)
    monkeypatch.setattr(step_timing, "time", SimpleNamespace(perf_counter=lambda: trainer.now_s))
    return trainer


def test_the_number_of_steps_follows_from_the_devices_time_not_the_hosts(trainer):
    trainer.timed_steps(None, LIMIT_S)
    assert trainer.num_steps == step_timing.WARM_UP_STEPS + int(LIMIT_S / (HOST_S + DEVICE_S))
