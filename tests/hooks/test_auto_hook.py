"""auto_hook: the trial's turns, the choice, and the errors that pass from one candidate to the next."""

import pytest
import torch

from gradcomp.hooks.auto_hook import CANDIDATES, AutoState, auto_hook
from gradcomp.testing import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient

pytestmark = pytest.mark.usefixtures("plain_torch")

SHAPES = [(40, 30), (17,), (8, 3, 5), (12, 10)]
MS = {"none": 90, "bf16": 60, "int8": 40, "int4": 33.5, "powersgd:16:int8": 33, "powersgd:8:int8": 32}


class Clock:
    """Seconds that pass with every step, by candidate. Ranks have unlike clocks; `factor` slows later steps."""

    def __init__(self, ms, rank=0):
        self.ms, self.rank, self.factor, self.seconds = ms, rank, 1.0, 0.0
        self.state = None

    def __call__(self):
        trial = self.state._trial
        name = None if trial is None else trial.current
        self.seconds += self.factor * self.ms.get(name, 1.0) * (1 - 0.1 * self.rank) / 1e3
        return self.seconds


def state_of(rank, ms=None, group=None, **options):
    clock = Clock(MS if ms is None else ms, rank)
    options = {"start_iter": 2, "steps_per_turn": 3, **options}
    clock.state = AutoState(group, clock=clock, **options)
    return clock.state, clock


def step_of(state, rank, step, shapes=SHAPES, dtype=torch.float32):
    gradient = random_gradient(shapes, rank, step, dtype)
    averaged = auto_hook(state, Bucket(gradient.clone(), shapes)).wait()
    return gradient, averaged


def steps(rank, group, num_steps, ms, options):
    state, _ = state_of(rank, ms, group, **options)
    used = []
    for step in range(num_steps):
        step_of(state, rank, step)
        used.append(state._phase.name)
    return used, state.choice, state.table


def test_turns_and_the_choice():
    """Slow candidates are left out after the first round; then the first within 5 % of the fastest is used."""
    results = run_ranks(steps, 2, 34, None, {})
    used, choice, table = results[0]
    first = [name for name in CANDIDATES for _ in range(3)]
    later = [name for name in CANDIDATES if MS[name] <= 1.5 * 32 for _ in range(3)]
    assert used[:2] == ["auto_hook"] * 2
    assert used[2:20] == first
    assert used[20:32] == later
    assert used == results[1][0]
    assert results[1][1] is None and choice is None  # the third round is still under way
    assert [row["candidate"] for row in table] == list(CANDIDATES)


def test_the_slowest_rank_counts():
    (used, choice, table), other = run_ranks(steps, 2, 60, None, {})
    assert choice == "int4"  # 33.5 ms is within 5 % of 32 ms
    assert used[-1] == "int4"
    assert other[1:] == (choice, table)
    assert [row["ms"] for row in table] == pytest.approx([MS[name] for name in CANDIDATES])
    assert all(row["sent_bytes"] > 0 for row in table)
    assert [row["nats"] for row in table] == [0.0, 0.0, -0.003, 0.008, 0.012, 0.037]
