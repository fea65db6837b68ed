"""On simulated ranks, compare a recorder's values with float64, and test that recording changes nothing."""

import copy
import math

import pytest
import torch

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress import CompressorState, Recorder, compress_hook
from gradcomp.compress import recording as module
from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.testing import RankError
from tests.compress.test_new_compressor import TopK, TopKOptions
from tests.depth import mixed
from tests.hooks.powersgd_oracle import Bucket, random_gradient, starts
from tests.hooks.powersgd_runs import equal, reload, simulate
from tests.kept import error_in
from tests.tolerances import RECORDED_NORM, SKETCHED_MEAN, SKETCHED_RATIO

START, STEPS = 2, 12
SHAPES = [[(64, 48), (7,), (40, 90)], [(64, 48), (33,)]]
POWERSGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": START, "min_compression_rate": 1}


def powersgd(**options):
    return lambda: powerSGD_hook.PowerSGDState(None, **POWERSGD | options)


# name -> (a function that makes a state, the hook)
HOOKS = {
    "PowerSGD": (powersgd(), powerSGD_hook.powerSGD_hook),
    "PowerSGD without error feedback": (powersgd(use_error_feedback=False), powerSGD_hook.powerSGD_hook),
    "PowerSGD, int8 factors, quantized start": (
        powersgd(factor_dtype=torch.int8, start_bits=8),
        powerSGD_hook.powerSGD_hook,
    ),
    "PowerSGD of whole buckets": (powersgd(), powerSGD_hook.batched_powerSGD_hook),
    "int4": (lambda: QuantizationState(bits=4, start_iter=START), quantization_hook),
    "int8 without error feedback": (
        lambda: QuantizationState(bits=8, start_iter=START, use_error_feedback=False),
        quantization_hook,
    ),
    "top-k": (lambda: CompressorState(TopK, TopKOptions(0.25)), compress_hook),
}
WRAPPED = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
ALL = HOOKS | {"bf16 around PowerSGD": (powersgd(), WRAPPED)}


def gradient_of(rank, step, index, dtype=torch.float32):
    return random_gradient(SHAPES[index], rank, 100 * step + index, dtype)


def errors_of(state):
    """Return this rank's error of every bucket; zeros if the state keeps no error."""
    numels = [starts(shapes)[-1] for shapes in SHAPES]
    error = error_in(state)
    return (torch.zeros(sum(numels)) if error is None else error).split(numels)


def train(rank, name, every=None, complete=True, num_steps=STEPS, max_rows=4096):
    """Return rows (none without every), outputs [step][bucket], errors after each step, and sent bytes."""
    make_state, hook = ALL[name]
    state = make_state()
    recording = None if every is None else Recorder(state, every=every, max_rows=max_rows)
    parameters = [[torch.empty(shape) for shape in shapes] for shapes in SHAPES]
    outputs, errors = [], []
    for step in range(num_steps):
        futures = []
        for index in range(len(SHAPES)):
            is_last = index == len(SHAPES) - 1
            bucket = GradBucket(index, gradient_of(rank, step, index), parameters[index], is_last)
            futures.append(hook(state, bucket))
        outputs.append([future.wait().clone() for future in futures])
        errors.append([each.double() for each in errors_of(state)])
    if recording is not None and complete:
        recording.complete()
    sent = torch.distributed.group.WORLD.sent_bytes
    return recording.rows() if recording else [], outputs, errors, sent


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.usefixtures("plain_torch")
def test_values_against_float64(name):
    ranks = simulate(train, 2, name, 1)
    is_quantized_start = "quantized start" in name
    ratios = []
    for index in range(len(SHAPES)):
        rows = [[row for row in rank[0] if row["bucket"] == index] for rank in ranks]
        assert [row["step"] for row in rows[0]] == list(range(STEPS))
        for step in range(STEPS):
            ours = [of_rank[step] for of_rank in rows]
            if step < START and not is_quantized_start:
                assert not ours[0]["compressed"]
                continue
            gradients = [gradient_of(rank, step, index).double() for rank in range(2)]
            output = ranks[0][1][step][index].double()
            errors = [rank[2][step][index] for rank in ranks]
            before = [rank[2][step - 1][index] if step else 0 * errors[0] for rank in ranks]
            for row, gradient, error in zip(ours, gradients, errors, strict=True):
                assert math.isclose(row["gradient_norm"], gradient.norm(), rel_tol=RECORDED_NORM)
                assert math.isclose(row["average_norm"], output.norm(), rel_tol=RECORDED_NORM)
                if "without error feedback" in name:
                    assert row["error_norm"] is None
                else:
                    assert math.isclose(row["error_norm"], error.norm(), rel_tol=RECORDED_NORM)
            mean = (sum(gradients) + sum(before)) / 2
            expected = float((mean - output).norm() / mean.norm())
            assert ours[0]["relative_error"] == ours[1]["relative_error"]
            found = ours[0]["relative_error"]
            assert math.isclose(found, expected, rel_tol=SKETCHED_RATIO), (step, found, expected)
            assert math.isclose(ours[0]["mean_norm"], mean.norm(), rel_tol=SKETCHED_RATIO)
            assert math.isclose(ours[0]["energy_kept"], 1 - found**2)
            ratios.append(found / expected)
    assert abs(sum(ratios) / len(ratios) - 1) < SKETCHED_MEAN


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("plain_torch")
def test_recording_changes_no_bit(name):
    """Without complete(), recording changes no sent byte either."""
    without = simulate(train, 2, name)
    for every in (1, 5):
        recorded = simulate(train, 2, name, every, False)
        for (_, *one), (rows, *other) in zip(without, recorded, strict=True):
            assert rows
            assert equal(one, other)


@pytest.mark.usefixtures("plain_torch")
def test_bytes_are_those_of_the_statistics():
    make_state, hook = HOOKS["PowerSGD"]

    def run(rank):
        state = make_state()
        recording = Recorder(state)
        for step in range(5):
            hook(state, Bucket(gradient_of(rank, step, 0), SHAPES[0])).wait()
        return state.compression_stats(), recording.rows()

    (((rate, before, after), rows),) = simulate(run, 1)
    compressed = [row for row in rows if row["compressed"]]
    assert len(compressed) == 3
    assert sum(row["gradient_bytes"] for row in compressed) == 4 * before
    assert sum(row["sent_bytes"] for row in compressed) == 4 * after
    assert compressed[0]["rate"] == rate
    plain = rows[0]
    assert plain["sent_bytes"] == plain["gradient_bytes"] == 4 * plain["numel"]
    assert (plain["rate"], plain["relative_error"], plain["energy_kept"]) == (1.0, 0.0, 1.0)
    assert plain["time_ms"] is plain["gradient_norm"] is plain["error_norm"] is None
    assert all(row["time_ms"] > 0 for row in compressed)


@pytest.mark.usefixtures("plain_torch")
def test_every_and_max_rows():
    (rows, *_), _ = simulate(train, 2, "int4", 5)
    assert [(row["step"], row["bucket"]) for row in rows] == [(s, b) for s in (0, 5, 10) for b in (0, 1)]
    (rows, *_), _ = simulate(train, 2, "int4", 1, True, STEPS, 4)
    assert [(row["step"], row["bucket"]) for row in rows] == [(s, b) for s in (10, 11) for b in (0, 1)]


def one_rank(*names, steps=5):
    """Run a single rank with the first bucket only; return (state, recorder)."""
    make_state, hook = HOOKS["int4"]
    state = make_state()
    recording = Recorder(state, **dict.fromkeys(names, 2))
    for step in range(steps):
        hook(state, Bucket(gradient_of(0, step, 0), SHAPES[0])).wait()
    return state, recording


def forgetting(rank):
    _, recording = one_rank()
    state, bounded = one_rank("max_rows")
    flushed = []
    recording.flush(lambda step, values: flushed.append(step))
    found = {"bounded": len(bounded.rows()), "flushed": flushed, "left": recording.rows()}
    bounded.detach()
    found["detached"] = state.recorder
    Recorder(state)
    return found


@pytest.mark.usefixtures("plain_torch")
def test_rows_are_forgotten_and_recorders_detached():
    assert simulate(forgetting, 1) == [
        {"bounded": 2, "flushed": [0, 1, 2, 3, 4], "left": [], "detached": None}
    ]


def forgetting_a_step(rank, max_rows):
    make_state, hook = HOOKS["int4"]
    state, steps = make_state(), []
    recording = Recorder(state, max_rows=max_rows)
    for step in range(5):
        for index in (0, 1):
            bucket = GradBucket(index, gradient_of(rank, step, index), [torch.empty(1)], index == 1)
            hook(state, bucket).wait()
        if step in (1, 3):  # a plain step, and a compressed one
            recording.forget_step(step)
            recording.forget_step(17)
    recording.complete()
    for row in recording.rows():
        steps.append(row["step"])
        assert row["relative_error"] is not None
    return steps


@pytest.mark.usefixtures("plain_torch")
def test_a_step_is_forgotten():
    assert simulate(forgetting_a_step, 2, 100) == [[0, 0, 2, 2, 4, 4]] * 2
    assert simulate(forgetting_a_step, 2, 3) == [[2, 4, 4]] * 2, "the newest rows stay"


def not_finite(rank, name, value):
    make_state, hook = HOOKS[name]
    state = make_state()
    recording = Recorder(state)
    for step in range(6):
        gradient = gradient_of(rank, step, 0)
        if step == 3 and rank == 0:
            gradient[5] = value
        hook(state, Bucket(gradient, SHAPES[0])).wait()
    recording.complete()
    return recording.rows()


@pytest.mark.parametrize(("name", "value"), mixed(list(HOOKS), [math.inf, math.nan]))
@pytest.mark.usefixtures("plain_torch")
def test_a_step_of_inf_or_nan_is_a_row_like_others(name, value):
    first, _ = simulate(not_finite, 2, name, value)
    assert len(first) == 6
    assert not math.isfinite(first[3]["gradient_norm"])
    if name != "top-k":  # it sends inf and keeps a finite error, so ‖E‖ / ‖M‖ may be 0
        assert not math.isfinite(first[3]["relative_error"])
    for row in (first[2], *first[4:]):
        assert all(math.isfinite(each) for each in row.values() if each is not None)


def saved_with_a_recorder(rank, name):
    make_state, hook = HOOKS[name]
    results = []
    for is_recorded in (False, True):
        state = make_state()
        if is_recorded:
            Recorder(state)
        for step in range(4):
            hook(state, Bucket(gradient_of(rank, step, 0), SHAPES[0])).wait()
        loaded = reload(state)
        assert loaded.recorder is None
        assert copy.deepcopy(state).recorder is None
        assert (state.recorder is not None) == is_recorded
        results.append((state.state_dict(), loaded.state_dict()))
    return results


@pytest.mark.parametrize("name", ["PowerSGD", "int4"])
@pytest.mark.usefixtures("plain_torch")
def test_checkpoints_do_not_contain_it(name):
    for without, recorded in simulate(saved_with_a_recorder, 2, name):
        assert equal(without, recorded)


@pytest.mark.usefixtures("plain_torch")
def test_without_a_recorder_nothing_is_measured(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("measured")

    monkeypatch.setattr(module, "measure", fail)
    simulate(train, 1, "PowerSGD")
    with pytest.raises(RankError, match="measured"):
        simulate(train, 1, "PowerSGD", 1)


@pytest.mark.usefixtures("plain_torch")
def test_a_step_that_is_not_due_is_not_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(module, "measure", lambda *_, **__: measured.append(1))
    simulate(train, 1, "int4", 100, False)
    assert not measured


def record_steps(rank, num_steps, *everies):
    """Take steps 0 to num_steps, and record from step 1 on; rank r records every everies[r]-th step."""
    make_state, hook = HOOKS["int4"]
    state = make_state()
    hook(state, Bucket(gradient_of(rank, 0, 0), SHAPES[0])).wait()
    recording = Recorder(state, every=everies[rank])
    for step in range(1, num_steps + 1):
        hook(state, Bucket(gradient_of(rank, step, 0), SHAPES[0])).wait()
    recording.complete()
    return recording.rows()


@pytest.mark.parametrize("other", [2, 100])  # with 100, rank 1 has no rows
@pytest.mark.usefixtures("plain_torch")
def test_ranks_with_other_rows_are_told_so(other):
    with pytest.raises(
        RankError, match=r"Recorder.complete\(\) differs between the ranks: the number of recorded rows"
    ):
        simulate(record_steps, 2, 4, 1, other)


@pytest.mark.usefixtures("plain_torch")
def test_nothing_recorded_is_complete():
    assert simulate(record_steps, 2, 4, 100, 100) == [[], []]


def test_what_it_refuses():
    state = QuantizationState()
    with pytest.raises(TypeError, match=r"takes the state of a compressing hook .* got None"):
        Recorder(None)
    for name in ("every", "max_rows"):
        with pytest.raises(ValueError, match=f"{name} is 0, but must be an int and at least 1"):
            Recorder(state, **{name: 0})
    assert state.recorder is None
    Recorder(state)
    with pytest.raises(ValueError, match="has a recorder already"):
        Recorder(state)
