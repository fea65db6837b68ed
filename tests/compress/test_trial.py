"""The rule by which a trial chooses, and the clock of steps."""

import math
from dataclasses import asdict
from itertools import chain, count
from random import Random

import pytest
import torch
import torch.distributed as dist

from gradcomp.compress.trial import MAX_SLOW_STEPS, Gain, SlowSteps, StepClock, Trial, choose
from gradcomp.hooks.auto_hook import CANDIDATES, AutoState


@pytest.mark.parametrize(
    ("seconds", "current", "chosen"),
    [
        ([10, 8, 6], None, 2),
        ([10, 6.2, 6], None, 1),
        ([6.2, 6.1, 6], None, 0),
        ([6.1, 6.2, 6], 2, 0),  # within half the tolerance after all
        ([6.29, 6.28, 6], 2, 2),  # within the tolerance, but not by enough to change
        ([10, 6.5, 6], 1, 1),  # not slower by enough to change
        ([10, 6.7, 6], 1, 2),
        ([10, math.inf, 6], 1, 2),
    ],
)
def test_the_mildest_of_those_that_pay(seconds, current, chosen):
    assert choose(seconds, 0.05, current) == chosen


def choice_of(seconds, wait, current=None):
    """Return which candidate a trial of one round chooses by these times: 0, too, where it isn't sure."""
    names, before = [str(i) for i in range(len(seconds))], None if current is None else str(current)
    trial = Trial(names, (2, 1), 2 + len(seconds[0]), 1, 0.05, before)
    trial.end_round([*chain(*seconds)], [wait] * len(seconds[0]), 0)
    assert trial.is_sure == (trial.choice is not None)
    return int(trial.choice or 0)


@pytest.mark.parametrize(
    ("spread", "current", "chosen"),
    [(0.0, None, 1), (0.4, None, 1), (1.0, None, 0), (1.0, 0, 0), (1.0, 1, 1)],
)
def test_the_gain_must_exceed_its_spread(spread, current, chosen):
    """A gain of 12 % is taken if its interval is above 5 %. If it is in use, the median is enough."""
    none = [10 + spread * (-1) ** i for i in range(12)]
    assert choice_of([none, [8.8] * 12], 5.0, current) == chosen
    assert choice_of([none, [8.8] * 12], 0.1, current) == 0  # above the wait
    assert choice_of([none, [9.9] * 12], 5.0, current) == 0


@pytest.mark.parametrize(
    ("num_pairs", "num_compared", "k"),
    [(1, 1, 1), (4, 5, 1), (12, 1, 3), (12, 5, 2), (12, 11, 2), (24, 5, 6)],
)
def test_the_interval_has_the_level_that_it_states(num_pairs, num_compared, k):
    """All 2ⁿ signs of the differences from the true median are as likely, whatever the noise."""
    gain = Gain.of([float(i) for i in range(num_pairs)], [0.0] * num_pairs, num_compared)
    assert (gain.low, gain.high) == (k - 1, num_pairs - k)
    below = sum(math.comb(num_pairs, i) for i in range(k)) / 2**num_pairs
    assert gain.level == pytest.approx(1 - 2 * below)
    assert below <= 0.05 / num_compared or k == 1
    assert below + math.comb(num_pairs, k) / 2**num_pairs > 0.05 / num_compared


HEAVY_TAILS = {
    "bursts": lambda random, num: [
        random.lognormvariate(0, 0.05) * (1 + (random.random() < 0.05) * random.expovariate(1))
        for _ in range(num)
    ],
    "exponential": lambda random, num: [1 + 0.3 * random.expovariate(1) for _ in range(num)],
    "Cauchy": lambda random, num: [
        1 + 0.1 * abs(math.tan(math.pi * (random.random() - 0.5))) for _ in range(num)
    ],
}


@pytest.mark.parametrize("noise", HEAVY_TAILS)
def test_noise_is_no_gain(noise):
    """Of 1,000 trials in equal noise, at least 995 choose the first candidate. A real gain is found."""
    draw, random = HEAVY_TAILS[noise], Random(0)
    trials = [[draw(random, 12) for _ in CANDIDATES] for _ in range(1000)]
    assert sum(choice_of(trial, math.inf) == 0 for trial in trials) == 1000  # the wait is unknown
    assert sum(choice_of(trial, 1.0) == 0 for trial in trials) >= 995
    for trial in trials:
        trial[3] = [0.3 * each for each in trial[3]]
    assert sum(choice_of(trial, 1.0) == 3 for trial in trials) >= 950


def trial_in(noise, speeds, random):
    """Return a trial of the default length at an end, where steps take 1 / speed times the noise."""
    trial = Trial(list(CANDIDATES), (2, 1), 6, 3, 0.05)
    while trial.choice is None:
        turns = [
            [noise(random) / speeds[CANDIDATES.index(name)] for _ in range(4)] for name in trial.taking_part
        ]
        trial.end_round([*chain(*turns)], [0.9] * 4, 0)
    return trial


def busy(random):
    """The times of a busy machine's steps: as log-normal ones of which one in ten takes longer, alone."""
    return random.lognormvariate(0, 0.25) * (1 + (random.random() < 0.1) * random.expovariate(1))


def test_a_gain_of_two_is_seen_on_a_busy_machine_and_no_gain_is_none():
    random = Random(0)
    trials = [trial_in(busy, [1, 1.2, 1.5, 2, 2, 2], random) for _ in range(200)]
    assert all(CANDIDATES.index(trial.choice) > 1 for trial in trials)
    assert sum(trial.round <= 6 for trial in trials) > 190
    equal = [trial_in(busy, [1] * 6, random) for _ in range(200)]
    assert sum(trial.choice == "none" for trial in equal) >= 190
    assert max(trial.round for trial in equal) == 12
    unsure, sure = (next(each for each in equal if each.is_sure == is_sure) for is_sure in (False, True))
    num_steps = 10 * 12 * 6 * len(CANDIDATES)
    assert [unsure.is_over_after(n, 10**4) for n in (1, num_steps, 10**4)] == [False, True, True]
    assert [sure.is_over_after(n, 10**4) for n in (1, num_steps, 10**4)] == [False, False, True]
    assert not unsure.is_over_after(num_steps, None)


def test_a_trial_goes_on_while_a_better_candidate_may_pay():
    """Two slow steps hide bf16's gain in 12 pairs, in which a slower candidate surely pays."""
    steps, speeds = count(), [1, 1.9, 1, 1, 1.3, 1]
    trial = trial_in(lambda _: 5.0 if next(steps) in (4, 28) else 1.0, speeds, Random(0))
    assert (trial.choice, trial.round, trial.is_sure) == ("bf16", 6, True)


def test_each_look_has_its_part_of_the_risk():
    """Gains as large as the tolerance are taken in at most one trial of twenty."""
    random, speed = Random(1), 1 / 0.95
    trials = [trial_in(busy, [1] + [speed] * 5, random) for _ in range(200)]
    assert sum(trial.choice != "none" for trial in trials) <= 10


@pytest.mark.parametrize(("speed", "rounds"), [(2.1, 2), (1.9, 3), (1.0, 3), (0.5, 1)])
def test_a_clear_gain_ends_a_trial_early(speed, rounds):
    trial = trial_in(lambda random: random.uniform(1, 1.01), [1] + [speed] * 5, Random(0))
    assert (trial.round, trial.is_sure, trial.choice) == (rounds, True, "bf16" if speed > 1 else "none")


def test_drift_between_rounds_cancels():
    """Steps take twice and four times as long in later rounds. The gain is of pairs, not of medians."""
    none = [factor * each for factor in (1, 2, 4) for each in (10.0, 10.1, 10.2, 10.3)]
    assert [choice_of([none, [part * each for each in none]], 100.0) for part in (0.8, 0.97)] == [1, 0]


def test_missing_times_have_no_pairs():
    none, other = [10.0] * 12, [math.inf] * 9 + [5.0] * 3
    assert Gain.of(none, other, 1) == Gain(5.0, 5.0, 5.0, 0.75)
    assert Gain.of(none, [math.inf] * 12, 1) is None
    assert Gain.of([9.0, 1.0, 1.0], [0.0] * 3, 1).median == 1.0
    assert (choice_of([none, other], 100.0), choice_of([other, none], 100.0)) == (1, 0)


def test_a_candidate_leaves_if_all_its_steps_are_slow():
    trial = Trial(["none", "int8", "int4"], (2, 1), 6, 3, 0.05)
    trial.end_round([*[100.0] * 4, *[300.0, 50.0] * 2, *[151.0] * 4], [90.0] * 4, 18)
    assert trial.taking_part == ["none", "int8"]


def test_a_round_without_times_is_repeated():
    trial = Trial(["none", "int4"], (2, 1), 3, 1, 0.05)
    trial.end_round([math.inf, 2.0], [math.inf], 8)
    assert (trial.choice, trial.unknown, trial.taking_part) == (None, ["none"], ["none", "int4"])
    trial.end_round([1.0, 2.0], [0.5], 14)
    assert (trial.choice, trial.chosen_at) == ("none", 14)
    assert (trial.seconds, trial.waits) == ({"none": [math.inf, 1.0], "int4": [2.0] * 2}, [math.inf, 0.5])


@pytest.mark.usefixtures("group_of_one")
def test_slow_steps_count_in_a_row():
    slow, given = SlowSteps(), (1.0, [dist.group.WORLD], torch.device("cpu"))
    steps = [(0, 2.0)] * (MAX_SLOW_STEPS - 1)
    found = [slow.are_too_many(each, *given) for each in (steps, [(0, 1.0)], steps, steps[:1], [])]
    assert found == [False] * 4 + [True]  # known one check later


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("names", [], r"trial: names is \[\]"),
        ("choice", "int3", "trial: choice is 'int3'"),
        ("before", 3, "trial: before is 3"),
        ("taking_part", ["int3"], r"trial: taking_part is \['int3'\]"),
        ("seconds", {"none": [1.0]}, "trial: seconds is"),
        ("waits", [1.0, 1.0], "trial: seconds is"),
        ("waits", None, "trial: an entry has another type"),
        ("tolerance", -1.0, "trial: tolerance is -1.0"),
        ("steps_per_turn", 2, "trial: steps_per_turn is 2"),
        ("step", 0.5, "trial: step is 0.5"),
        ("place", [2], r"trial: place is \[2\]"),
        ("sent_bytes", {"none": -3}, "trial: sent_bytes is"),
    ],
)
def test_a_damaged_trial_is_refused(entry, value, message):
    trial = Trial(["none", "int4"], (2, 1), 3, 1, 0.05, sent_bytes={"none": 7})
    trial.end_round([1.0, 2.0], [0.5], 14)
    state, saved = AutoState(), AutoState().state_dict() | {"trial": asdict(trial)}
    state.load_state_dict(saved)
    assert state.state_dict()["trial"] == asdict(trial)
    saved["trial"] = {**asdict(trial), entry: value}
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(saved)
    del saved["trial"][entry]
    with pytest.raises(KeyError, match="lacks"):
        state.load_state_dict(saved)


def test_the_clock_forgets():
    clock = StepClock(iter(range(10)).__next__)
    for number in (0, 1):
        clock.end_step(number)
    assert clock.take() == [(1, 1.0)]
    clock.end_step(2)
    assert clock.take() == [(2, 1.0)]
    clock.forget()
    clock.end_step(3)
    assert clock.take() == []


def test_a_step_ends_where_its_last_hook_begins_and_waits_for_all_averages(monkeypatch):
    now, cpu = [0.0], torch.device("cpu")
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock()

    def at(seconds, action, *given):
        now[0] = seconds
        action(*given)

    for start, number in ((0.0, 3), (10.0, 4)):
        averages = [torch.futures.Future(), torch.futures.Future()]
        for seconds, average in zip((1.0, 2.0), averages, strict=True):
            at(start + seconds, clock.begin_bucket, cpu)
            clock.add_wait(4, average, cpu) if number == 4 else None
        at(start + 2.5, clock.end_step, number)
        at(start + 3.0, averages[1].set_result, torch.zeros(1))
        at(start + 5.0, averages[0].set_result, torch.zeros(1))
    clock.add_wait(5, torch.futures.Future(), cpu)  # which never ends
    assert clock.take() == [(4, 10.0)]
    assert [clock.take_waits(of_each=False) for _ in range(2)] == [{4: 3.0}, {}]


def test_waits_add_up_where_every_bucket_is_waited_for(monkeypatch):
    now, cpu = [0.0], torch.device("cpu")
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StepClock()
    for start, end in ((1.0, 3.0), (4.0, 4.5)):
        average = torch.futures.Future()
        now[0] = start
        clock.begin_bucket(cpu)
        clock.add_wait(7, average, cpu)
        now[0] = end
        average.set_result(torch.zeros(1))
    assert clock.take_waits(of_each=True) == {7: 2.5}
