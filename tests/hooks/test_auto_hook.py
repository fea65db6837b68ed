"""auto_hook: the trial's turns, the choice, and the errors that pass from one candidate to the next."""

import math

import pytest
import torch
import torch.distributed as dist

from gradcomp.compress import Recorder
from gradcomp.compress.checkpoint import average_errors
from gradcomp.compress.trial import Trial
from gradcomp.hooks.auto_hook import CANDIDATES, AutoState, auto_hook
from gradcomp.testing import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.hooks.powersgd_runs import reload
from tests.kept import error_in

pytestmark = pytest.mark.usefixtures("plain_torch")

# Matrices, vectors, and a matrix that int4 sends exactly and PowerSGD doesn't.
SHAPES = [(40, 30), (17,), (8, 3, 5), (12, 10), (9, 9)]
MS = {"none": 90, "bf16": 60, "int8": 40, "int4": 33.5, "powersgd:16:int8": 33, "powersgd:8:int8": 32}
KEEP_ERRORS = ("none", "int8", "int4", "powersgd:4", "powersgd:2")  # or make none


class Clock:
    """Seconds that pass with every step, by candidate; faster on higher ranks. `factor` slows steps.

    The ranks' mean is `ms`.
    """

    def __init__(self, ms, rank=0, world_size=1):
        self.ms, self.factor, self.seconds = ms, 1.0, 0.0
        self.of_rank = 1 + 0.1 * ((world_size - 1) / 2 - rank)
        self.state = None

    def __call__(self):
        trial = self.state._trial
        name = None if trial is None else trial.current
        self.seconds += self.factor * self.ms.get(name, 1.0) * self.of_rank / 1e3
        return self.seconds


def state_of(rank, group=None, ms=None, wait_ms=1e4, **options):
    clock = Clock(MS if ms is None else ms, rank, 1 if group is None else group.size())
    clock.state = AutoState(group, clock=clock, **{"start_iter": 2, "steps_per_turn": 3, **options})
    clock.state._clock.take_waits = lambda **_: dict.fromkeys(range(10), wait_ms / 1e3)
    return clock.state


def step_of(state, rank, step, dtype=torch.float32):
    gradient = random_gradient(SHAPES, rank, step, dtype)
    return gradient, auto_hook(state, Bucket(gradient.clone(), SHAPES)).wait().clone()


def take_steps(state, rank, steps):
    for step in steps:
        step_of(state, rank, step)


def steps(rank, group, num_steps, options):
    """Take steps. Returns the candidates in use, the choice, and the table."""
    state, used = state_of(rank, group, **options), []
    for step in range(num_steps):
        step_of(state, rank, step)
        used.append(state._phase.name)
    return used, state.choice, state.table


def test_the_turns_and_the_choice_of_the_mildest_within_the_tolerance(caplog):
    """Later only none and those that took at most 1.5 times the fastest one's time take turns."""
    caplog.set_level("INFO", "gradcomp")
    (used, choice, table), other = run_ranks(steps, 2, 51, {})
    assert used[:2] == ["auto_hook"] * 2
    assert used[2:20] == [name for name in CANDIDATES for _ in range(3)]
    left = [name for name in CANDIDATES if name == "none" or MS[name] <= 1.5 * 32]
    assert used[20:35] == used[35:50] == [name for name in left for _ in range(3)]
    assert choice == used[-1] == "int4"  # 33.5 ms is within 5 % of 32 ms
    assert other == (used, choice, table)
    assert [row["candidate"] for row in table] == list(CANDIDATES)
    assert [row["ms"] for row in table] == pytest.approx([MS[name] for name in CANDIDATES])
    assert all(row["sent_bytes"] > 0 for row in table)
    assert [row["nats"] for row in table] == [0.0, 0.0, 0.0, 0.004, 0.006, 0.032]
    assert [row["gain_ms"] for row in table] == [
        None,
        *(pytest.approx(90 - MS[name]) for name in CANDIDATES[1:]),
    ]
    assert [row["wait_ms"] for row in table] == [1e4, None, None, None, None, None]
    slow = "it took more than 1.5 times the fastest one's time"
    assert [row["why"] for row in table] == ["", slow, *[""] * 4]
    tried, said = [line for line in caplog.messages if "auto_hook" in line]
    assert tried.endswith(f"auto_hook tries {', '.join(CANDIDATES)} from step 2 to about step 56")
    gain = "gain 56.5 ms (56.5 to 56.5)"
    assert f"auto_hook uses int4 from step 50 on: {gain} of a wait of 1e+04 ms. Each" in said
    assert "gain over none (interval at 75.0%)" in said  # three pairs
    assert f"int4 33.5 ms, {gain}, 2.03 kB, +0.004" in said
    assert "bf16 60 ms, " in said
    assert "bf16 60 ms, gain" not in said  # it left: its gain is of one round


def test_without_tolerance_the_fastest_is_used():
    assert run_ranks(steps, 2, 21, {"tolerance": 0.0, "rounds": 1})[0][1] == "powersgd:8:int8"


@pytest.mark.parametrize(
    ("wait_ms", "shown", "why"),
    [
        (51, "gain 50 ms (50 to 50) of a wait of 51 ms", ""),
        (49, "within a wait of 49 ms", "it gains more than the wait, so something else has changed"),
        (math.inf, "within an unknown wait", "its gain or the wait is unknown"),
    ],
)
def test_a_gain_above_the_wait_or_of_an_unknown_wait_does_not_count(wait_ms, shown, why, caplog):
    caplog.set_level("INFO", "gradcomp")
    options = {"wait_ms": wait_ms, "candidates": ("none", "int8"), "rounds": 1}
    _, choice, table = run_ranks(steps, 2, 9, options)[0]
    assert choice == ("none" if why else "int8")
    assert "steps vary too much" not in caplog.text
    assert table[1]["why"] == why
    assert shown in caplog.text


def test_one_rank_needs_no_trial():
    used, choice, _ = run_ranks(steps, 1, 4, {})[0]
    assert choice == "none"
    assert used[2:] == ["none"] * 2


def test_the_strongest():
    assert AutoState(strongest="int8").candidates == ("none", "bf16", "int8")


def test_with_nodes_each_is_tried_in_two_forms():
    ms = MS | {f"{name} hierarchical": each for name, each in MS.items()}
    ms |= {"int4 hierarchical": 20, "int8 hierarchical": 20.5}
    options = {"ms": ms, "ranks_per_node": 2, "rounds": 1}
    used, choice, table = run_ranks(steps, 4, 2 + 3 * 2 * len(CANDIDATES) + 1, options)[0]
    assert [row["candidate"] for row in table] == [
        form for name in CANDIDATES for form in (f"{name} hierarchical", name)
    ]
    assert choice == used[-1] == "int8 hierarchical"
    sent = {row["candidate"]: row["sent_bytes"] for row in table}
    assert sent["int8 hierarchical"] <= 1.1 * sent["int8"]


# --- other trials ---


@pytest.mark.simulated_ranks(2)
def test_slow_steps_begin_another_trial(rank, caplog):
    """All steps become 10 times slower, the strong ones less: noticed within 100 steps."""
    caplog.set_level("INFO", "gradcomp")
    state = state_of(rank, dist.group.WORLD, ms={**MS, "bf16": 32})
    take_steps(state, rank, range(60))
    first = state.choice
    state._clock._now.ms = {name: 10 * each for name, each in MS.items()} | {"powersgd:8:int8": 50}
    take_steps(state, rank, range(60, 160))
    noticed = state.choice is None
    take_steps(state, rank, range(160, 260))
    assert (first, noticed, state.choice) == ("bf16", True, "powersgd:8:int8")
    assert "50 steps in a row were slow, so the trial is repeated" in caplog.text


def test_another_trial_after_so_many_steps_has_times_of_its_own():
    """Steps before it, whose times no check has read yet, don't count."""

    def run(rank, group):
        state, used = state_of(rank, group, retrial_every=45, rounds=1), []
        for step in range(84):
            if step == 65:  # chosen at 20, tried again from 65 on
                state._clock._now.ms = {**MS, "int4": 300}
            step_of(state, rank, step)
            used.append(state._phase.name)
        return used, state._trial.chosen_at, {row["candidate"]: row["ms"] for row in state.table}

    for used, chosen_at, table in run_ranks(run, 2):
        assert used[20:68] == ["int4"] * 45 + ["none"] * 3
        assert chosen_at == 65 + 18
        assert table["int4"] == pytest.approx(300)


@pytest.mark.simulated_ranks(2)
@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [
        ("rounds", 2, None),
        ("steps_per_turn", 4, None),
        ("tolerance", 0.3, None),
        ("candidates", ["none", "int4"], None),
        ("random_seed", 3, "int8"),
    ],
)
def test_a_trials_other_settings_begin_another_trial(rank, name, value, choice):
    state = state_of(rank, dist.group.WORLD, candidates=("none", "int8"), rounds=1)
    take_steps(state, rank, range(9))
    assert state.choice == "int8"
    setattr(state, name, value)
    step_of(state, rank, 9)
    assert state.choice == choice


# --- errors ---


def totals(rank, group, num_steps, options):
    state = state_of(rank, group, candidates=KEEP_ERRORS, rounds=1, **options)
    inputs, outputs, left = 0.0, 0.0, []
    for step in range(num_steps):
        gradient, averaged = step_of(state, rank, step)
        inputs, outputs = inputs + gradient.double(), outputs + averaged.double()
        error = error_in(state)
        left.append((inputs, outputs, torch.zeros_like(gradient) if error is None else error.double()))
    return left, state.state_dict()


@pytest.mark.parametrize("options", [{}, {"ranks_per_node": 2}], ids=["flat", "hierarchical"])
def test_nothing_is_lost_when_candidates_change(options):
    """After every step of a trial and after it: Σ averages + the mean error = Σ mean gradients."""
    ms = {name: 10.0 for form in KEEP_ERRORS for name in (form, f"{form} hierarchical")} | {"powersgd:2": 9.0}
    results = run_ranks(totals, 4, 45, {"ms": ms, **options})
    for by_rank in zip(*(left for left, _ in results), strict=True):
        mean, error = (torch.stack([each[i] for each in by_rank]).mean(0) for i in (0, 2))
        for _, outputs, _ in by_rank:
            assert torch.allclose(outputs + error, mean, atol=2e-5)
    assert float(results[0][0][-1][2].abs().max()) > 0


def test_errors_are_sent_when_nothing_compresses():
    results = run_ranks(totals, 2, 45, {"ms": dict.fromkeys(KEEP_ERRORS, 10.0)})
    assert all(saved["trial"]["choice"] == "none" for _, saved in results)
    for left, _ in results:
        assert not left[-1][2].any()


def staged_steps(rank, group, ms):
    """Return the choice, and which of 45 steps were averaged in stages."""
    state, begun = state_of(rank, group, candidates=("none", "int8"), rounds=1, ms=ms), []
    staged = []
    with pytest.MonkeyPatch.context() as patch:
        add = state._pipeline.add
        patch.setattr(state._pipeline, "add", lambda *given, **named: begun.append(1) or add(*given, **named))
        for step in range(45):
            begun.clear()
            step_of(state, rank, step)
            staged.append(bool(begun))
    return state.choice, staged


def test_where_nothing_pays_steps_are_plain_once_the_errors_are_sent():
    """The last two staged steps of "none" send the errors, and free them."""
    for choice, staged in run_ranks(staged_steps, 2, {"none": 10.0, "int8": 11.0}):
        assert choice == "none"
        # Plain steps, none's turn, int8's turn, two steps that send and free its errors, plain steps.
        assert staged == [False] * 5 + [True] * 5 + [False] * 35
    for choice, staged in run_ranks(staged_steps, 2, {"none": 20.0, "int8": 11.0}):
        assert (choice, staged[-1]) == ("int8", True)


# --- checkpoints ---


@pytest.mark.simulated_ranks(2)
def test_a_run_resumed_after_the_choice_goes_on_with_equal_bits(rank):
    state, resumed = state_of(rank, dist.group.WORLD), state_of(rank, dist.group.WORLD)
    take_steps(state, rank, range(55))
    resumed.load_state_dict(reload(state.state_dict()))
    assert resumed.choice == state.choice
    assert resumed.table == state.table
    for step in range(55, 70):
        averaged, again = (step_of(each, rank, step)[1] for each in (state, resumed))
        assert torch.equal(averaged, again)
    assert resumed.choice == "int4"


@pytest.mark.parametrize(("at", "is_another"), [(3, False), (9, False), (64, True)])
def test_a_load_begins_a_trial_again(at, is_another):
    """As many steps as before a new run's trial, here four, may be slow in the new process."""
    options = {"start_iter": 4, "retrial_every": 10 if is_another else None}

    def run(rank, group):
        state = state_of(rank, group, **options)
        take_steps(state, rank, range(at))
        saved, used = reload(state.state_dict()), []
        state = state_of(rank, group, **options)
        state.load_state_dict(saved)
        for step in range(at, at + 70):
            state._clock._now.factor = 30 if step < at + 4 else 1
            step_of(state, rank, step)
            used.append(state._phase.name)
            if state.choice is not None:
                break
        return used, state.choice, state._trial.seconds

    (used, choice, times), other = run_ranks(run, 2)
    assert (used, choice, times) == other
    assert choice == "int4"
    num_plain = max(4 - at, 0)
    assert used[num_plain:8] == [*["none"] * (7 - num_plain), "bf16"]
    for name, each in times.items():
        known = [seconds for seconds in each if seconds < math.inf]
        assert known == pytest.approx([MS[name] / 1e3] * len(known))


def test_ranks_that_stay_begin_again_with_those_that_load():
    """Ranks have trained alone. Rank 1 is replaced in a trial, and loads; all ranks have a new group."""

    def run(rank, group):
        state, used = state_of(rank, group, rounds=1), []
        state._trial = Trial(["none"], (1, 1), 3, 1, 0.05, chosen_at=rank)
        take_steps(state, rank, range(9))
        if rank == 1:
            saved = state.state_dict()
            state = state_of(rank, group, rounds=1)
            state.load_state_dict(saved)
        state.process_group = group
        for step in range(9, 9 + 2 + 18 + 1):
            step_of(state, rank, step)
            used.append(state._phase.name)
        return used, state.choice

    ours, theirs = run_ranks(run, 2)
    assert ours == theirs
    assert ours[0][:6] == [*["none"] * 5, "bf16"]
    assert ours[1] == "int4"


# --- clocks ---


BROKEN_CLOCKS = {
    "goes back": lambda: iter(range(10**6, 0, -1)).__next__,
    "stands still": lambda: lambda: 7.0,
    "NaN": lambda: lambda: math.nan,
    "infinite": lambda: lambda: math.inf,
}


@pytest.mark.parametrize(("name", "is_everywhere"), list(zip(BROKEN_CLOCKS, (True, False) * 2, strict=True)))
def test_a_trial_ends_without_times(name, is_everywhere, caplog):
    """After four times the rounds, the first candidate is used on all ranks."""

    def run(rank, group):
        used = []
        state = state_of(rank, group, candidates=("none", "int8", "int4"), rounds=1, retrial_every=20)
        if is_everywhere or rank == 1:
            state._clock._now = BROKEN_CLOCKS[name]()
        for step in range(2 + 4 * 9 + 2):
            step_of(state, rank, step)
            used.append(state.choice)
        return used, state.table[0]["ms"], state.state_dict()

    (used, ms, saved), other = run_ranks(run, 2)
    assert used == other[0] == [None] * (2 + 4 * 9) + ["none"] * 2
    assert ms is None
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 2, "one on each rank"
    assert "int4 after 4 rounds, so it uses none. Likely cause: a clock that stands still" in warnings[0]
    AutoState().load_state_dict(saved)


def saved_after(rank, group, num_steps):
    state = state_of(rank, group)
    take_steps(state, rank, range(num_steps))
    return state.state_dict()


def test_another_number_of_ranks_measures_again():
    merged = average_errors(run_ranks(saved_after, 2, 51), AutoState().checked)
    assert merged["trial"]["choice"] == "int4"

    def run(rank, group):
        state = state_of(rank, group)
        state.load_state_dict(merged)
        assert state.choice == "int4"
        step_of(state, rank, 60)
        return state.choice, state._phase.name

    assert run_ranks(run, 3) == [(None, "none")] * 3


# --- what it records ---


def test_the_recorder_has_the_choice():
    def run(rank, group):
        state = state_of(rank, group)
        recorder = Recorder(state, every=20)
        take_steps(state, rank, range(51))
        return recorder.choices, state.table

    (ours, table), theirs = run_ranks(run, 2)
    assert theirs == (ours, table)
    assert ours == [{"step": 50, "choice": "int4", "candidates": table}]


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ["none", "int3"]}, "there is no hook 'int3'; known are none"),
        ({"candidates": [8]}, "there is no hook '8'"),
        ({"candidates": []}, r"candidates is \[\], but must be a list"),
        ({"candidates": "none"}, "candidates is 'none', but must be a list of names"),
        ({"candidates": ["none", "int4", "none"]}, "candidates has 'none' twice"),
        ({"tolerance": 1.0}, "tolerance is 1.0, but must be a number of at least 0 and below 1"),
        ({"tolerance": -0.1}, "tolerance is -0.1"),
        ({"steps_per_turn": 2}, "steps_per_turn is 2, but must be an int above 2"),
        ({"rounds": 0}, "rounds is 0"),
        ({"retrial_every": 0}, "retrial_every is 0"),
        ({"strongest": "int2"}, "strongest is 'int2', which is not one of the candidates"),
        ({"start_iter": 1}, "start_iter is 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AutoState(**options)


def test_unlike_candidates_are_named_on_every_rank():
    def run(rank, group):
        state = state_of(rank, group, candidates=["none", ("int4", "int8")[rank]])
        with pytest.raises(RuntimeError, match=r'candidates\[1\] is "int4" on rank 0 and "int8" on rank 1'):
            step_of(state, rank, 0)

    run_ranks(run, 2)


def test_another_state():
    with pytest.raises(TypeError, match="auto_hook takes a gradcomp AutoState as its state, got None"):
        auto_hook(None, Bucket(torch.zeros(3), [(3,)]))
