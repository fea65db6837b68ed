"""PowerSGD's options: values that the constructor, an assignment and a checkpoint refuse or accept."""

import inspect
import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.compress.checkpoint import PROGRESS
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from tests.hooks.powersgd_runs import Messages, reload

NAN, INF = math.nan, math.inf
FLAGS = ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape")
REFUSED = [
    *[("matrix_approximation_rank", value) for value in (0, -1, 2.0, NAN, "4", None, True, [4])],
    *[("start_powerSGD_iter", value) for value in (2.5, NAN, INF, "7", None, True)],
    *[("min_compression_rate", value) for value in (NAN, -1.0, "2", None, True, 2j)],
    *[("orthogonalization_epsilon", value) for value in (NAN, -1e-8, INF, "0", None, False)],
    *[("random_seed", value) for value in (-5, 2**32, 1.0, None, False)],
    *[("compression_stats_logging_frequency", value) for value in (0.5, NAN, INF, "9", True)],
    *[(flag, value) for flag in FLAGS for value in (1, 0, None, "no", 0.0)],
    *[("factor_dtype", value) for value in (torch.int16, "int8")],
    *[("start_bits", value) for value in (5, True)],
]
TAKEN = [
    ("start_powerSGD_iter", 1e3, 1000),
    ("min_compression_rate", 0, 0.0),
    ("min_compression_rate", INF, INF),
    ("min_compression_rate", Fraction(3, 2), 1.5),
    ("orthogonalization_epsilon", 1, 1.0),
    ("compression_stats_logging_frequency", 0, 1),
    ("compression_stats_logging_frequency", -3, 1),
]


OPTIONS = list(inspect.signature(PowerSGDState).parameters)[1:]


def options_of(state):
    return {name: getattr(state, name) for name in OPTIONS}


def with_option(state, name, value):
    """Return the state's state_dict with another value of an option or setting."""
    saved = state.state_dict()
    if name in saved["options"]:
        return saved | {"options": saved["options"] | {name: value}}
    return saved | {"start_iter" if name == "start_powerSGD_iter" else name: value}


def change(state, name, value):
    """Yield a function for every way in which a user can set an option."""
    yield lambda: PowerSGDState(None, **{name: value})
    yield lambda: setattr(state, name, value)
    yield lambda: state.load_state_dict(with_option(state, name, value))
    yield lambda: state.__setstate__(with_option(state, name, value))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_everywhere(name, value):
    state = PowerSGDState(None, 3)
    before = state.state_dict()
    for attempt in change(state, name, value):
        with pytest.raises(ValueError, match=rf"^({name}|start_iter) is .*, but must be "):
            attempt()
    assert state.state_dict() == before


@pytest.mark.parametrize(("name", "value", "kept"), TAKEN, ids=str)
def test_what_torch_takes_is_taken(name, value, kept):
    torch_powersgd.PowerSGDState(None, **{name: value})
    state = PowerSGDState(None)
    with Messages():
        for attempt in change(state, name, value):
            found = getattr(attempt() or state, name)
            assert (found, type(found)) == (kept, type(kept))


def test_an_assignment_that_would_start_too_early_is_refused():
    state = PowerSGDState(None)
    with pytest.raises(ValueError, match=r"Expect `start_powerSGD_iter` > 1 if .* Got 1\."):
        state.start_powerSGD_iter = 1
    state.use_error_feedback = state.warm_start = False
    state.start_powerSGD_iter = 1
    with pytest.raises(ValueError, match=r"Expect `start_powerSGD_iter` > 1 if "):
        state.warm_start = True
    assert options_of(state) == options_of(PowerSGDState(None, 1, 1, 2, False, False))


@pytest.mark.parametrize("name", PROGRESS)
@pytest.mark.parametrize("value", [-1, 0.5, NAN, "7", None, True])
def test_progress_that_cannot_be_is_refused(name, value):
    state = PowerSGDState(None)
    with pytest.raises(ValueError, match=rf"^{name} is .*, but must be a whole number of at least 0"):
        state.load_state_dict(state.state_dict() | {name: value})
    assert [getattr(state, name) for name in PROGRESS] == [0] * len(PROGRESS)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in the group that new_group made"),
        (4, "another argument came first"),
        ("gloo", "another argument came first"),
        ((1, 2), "another argument came first"),
    ],
    ids=str,
)
def test_a_process_group_that_is_none_is_refused(given, cause, group_of_one):
    state = PowerSGDState(None)
    for attempt in (lambda: PowerSGDState(given), lambda: setattr(state, "process_group", given)):
        with pytest.raises(
            TypeError, match=f"takes a process group or None as its process_group, got .*{cause}"
        ):
            attempt()
    group = dist.new_group([0])
    state.process_group = group
    assert state.process_group is group is PowerSGDState(group).process_group


def test_numpys_scalars_become_pythons():
    """torch.load would refuse a checkpoint with numpy's scalars. numpy's bool isn't a registered number."""
    numpy = pytest.importorskip("numpy")
    given = {
        "matrix_approximation_rank": numpy.int64(3),
        "start_powerSGD_iter": numpy.uint8(9),
        "min_compression_rate": numpy.float32(1.5),
        "use_error_feedback": numpy.bool_(False),
        "warm_start": numpy.True_,
        "orthogonalization_epsilon": numpy.longdouble(0.5),
        "random_seed": numpy.array(7)[()],
        "compression_stats_logging_frequency": numpy.int16(11),
        "batch_tensors_with_same_shape": numpy.bool_(True),
    }
    expected = dict(zip(given, (3, 9, 1.5, False, True, 0.5, 7, 11, True), strict=True))
    expected |= {
        "factor_dtype": None,
        "uncompressed_dtype": None,
        "start_bits": None,
        "ranks_per_node": "auto",
    }
    constructed, assigned, loaded = PowerSGDState(None, **given), PowerSGDState(None), PowerSGDState(None)
    for name, value in given.items():
        setattr(assigned, name, value)
    for name, value in {**given, "iter": numpy.int64(5)}.items():
        loaded.load_state_dict(with_option(loaded, name, value))
    for state in (constructed, assigned, loaded):
        assert options_of(state) == expected
        assert all(type(options_of(state)[name]) in (bool, int, float) for name in given)
        with Messages():
            assert options_of(reload(state)) == expected
    assert type(loaded.iter) is int
    assert loaded.iter == 5
