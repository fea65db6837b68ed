"""State_dicts that PowerSGD refuses to load, and their messages; a refused one changes nothing."""

import copy

import pytest
import torch

from gradcomp import ops
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from tests.hooks.powersgd_runs import START, equal, new_state, reload, run_steps

NOT_THROUGH_DCP = "torch.distributed.checkpoint can't save a state's state_dict: save per_rank_state_dict"


@pytest.fixture(scope="module")
def saved():
    """Return the state_dict of a state with an error and directions, made in this process."""
    from benchmarks.hooks import join_group_of_one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_INTERPRETED", False)
        join_group_of_one(torch.device("cpu"))
        state = new_state()
        run_steps(state, 0, range(START + 2))
        saved = state.state_dict()
        torch.distributed.destroy_process_group()
    return saved


def of_all(**changes):
    return lambda state_dict: state_dict.update(changes)


def of_first(name, function):
    """Return a change of the first parameter's "error" or "direction"."""

    def change(state_dict):
        entry = next(iter(state_dict["parameters"].values()))
        entry[name] = function(entry[name])

    return change


def renamed(name):
    """Return a change of the first parameter's name."""

    def change(state_dict):
        entries = state_dict["parameters"]
        entries[name] = entries.pop(next(iter(entries)))

    return change


def with_nan(tensor):
    tensor.view(-1)[5] = torch.nan
    return tensor


def like_dcp(state_dict):
    """Fill a fresh state's state_dict: torch.distributed.checkpoint loads no parameters into it."""
    state_dict["parameters"] = {}


MISFITS = {
    "error of NaN": (of_first("error", with_nan), "error has values that aren't finite"),
    "error of inf": (of_first("error", lambda e: e / 0), "error has values that aren't finite"),
    "error of ints": (of_first("error", lambda e: e.int()), r"of torch\.int32, but must be of a floating"),
    "error of floats": (of_first("error", lambda e: e.tolist()), "error is a list, but must be a tensor"),
    "sparse error": (of_first("error", lambda e: e.to_sparse()), r"error is torch\.sparse_coo on cpu"),
    "error without values": (
        of_first("error", lambda e: e.to("meta")),
        "on meta, but must be dense and have values",
    ),
    "expanded error": (
        of_first("error", lambda e: e[:, :1].clone().expand(-1, 2**40)),
        "takes 281474976710656 bytes, but its storage has 256: it must not repeat",
    ),
    "direction of NaN": (of_first("direction", lambda d: d / 0), "direction has values that aren't finite"),
    "direction in 1-D": (of_first("direction", lambda d: d[0]), r"a direction \[2\] of torch.float32, but"),
    "direction of one row": (of_first("direction", lambda d: d[:1]), r"a direction \[1, 2\] .* \[48, rank\]"),
    "direction in fp16": (
        of_first("direction", lambda d: d.half()),
        r"of torch.float16, but .* float32 or float64",
    ),
    "no error": (lambda d: next(iter(d["parameters"].values())).pop("error"), "has a direction but no error"),
    "an error of a bucket": (renamed(("a", "b")), "has an error, but errors belong to one parameter each"),
    "a square of one parameter": (
        lambda d: next(iter(d["parameters"].values())).update(square_direction=torch.ones(48, 2)),
        "has the unknown 'square_direction'",
    ),
    "direction of ints": (of_first("direction", lambda d: d.int()), r"a direction \[48, 2\] of torch.int32"),
    "an entry that nobody knows": (
        lambda d: d["parameters"].update({next(iter(d["parameters"])): {"momentum": torch.ones(3)}}),
        "has the unknown 'momentum'",
    ),
    "an entry of a list": (
        lambda d: d["parameters"].update({next(iter(d["parameters"])): []}),
        "has a list, but must have a dict",
    ),
    "a name of ints": (renamed(7), rf"has the key 7, but its keys must be names.*{NOT_THROUGH_DCP}"),
    "a name of pairs of ints": (renamed((1, 2)), r"has the key \(1, 2\), but its keys must be names"),
    "a future version": (of_all(version=2), "version is 2, but this gradcomp reads 1"),
    "a version of True": (of_all(version=True), "version is True, but this gradcomp reads 1"),
    "a version of None": (of_all(version=None), "version is None, but this gradcomp reads 1"),
    "an owner of no world": (
        of_all(errors_of={"rank": 0, "world_size": 0}),
        r"errors_of\['world_size'\] is 0",
    ),
    "an owner outside": (
        of_all(errors_of={"rank": 2, "world_size": 2}),
        "errors_of is rank 2 of a world size of 2",
    ),
    "an owner by name": (of_all(errors_of="rank 0"), "errors_of is a str, but must be a dict"),
    "parameters as a list": (of_all(parameters=[]), "parameters is a list, but must be a dict"),
    "parameters by number": (of_all(num_parameters="5"), "should hold '5' parameters, but holds 5"),
    "filled by DCP": (like_dcp, rf"should hold 5 parameters, but holds 0.*{NOT_THROUGH_DCP}"),
}
KEYS = {
    "a missing key": (lambda d: d.pop("options"), "the state_dict lacks options"),
    "missing keys": (lambda d: [d.pop("iter"), d.pop("parameters")], "the state_dict lacks iter, parameters"),
    "an unknown key": (of_all(warmstart=True), "the state_dict has the unknown 'warmstart'"),
    "both": (lambda d: d.update(a=d.pop("iter")), "the state_dict lacks iter and has the unknown 'a'"),
    "of the options": (lambda d: d["options"].pop("warm_start"), "options lacks warm_start"),
    "a whole checkpoint": (lambda d: [d.clear(), d.update(model=1)], "it has model. .* a whole checkpoint"),
    "no version": (lambda d: d.pop("version"), "the state_dict lacks version"),
}


def refuse(saved, change, error, match):
    """Check that loading raises an error, and changes neither a used, a fresh, nor an uninitialized state."""
    broken = copy.deepcopy(saved)
    change(broken)
    used, fresh, bare = new_state(random_seed=9), new_state(), PowerSGDState.__new__(PowerSGDState)
    used.load_state_dict(saved | {"random_seed": 9})
    for state in (used, fresh, bare):
        attributes = dict(vars(state))
        before = state.state_dict() if attributes else None
        for load in (state.load_state_dict, state.__setstate__):
            with pytest.raises(error, match=match):
                load(broken)
            assert vars(state) == attributes
            assert before is None or equal(state.state_dict(), before)


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_is_refused(saved, name):
    refuse(saved, MISFITS[name][0], ValueError, MISFITS[name][1])


@pytest.mark.parametrize("name", KEYS)
def test_missing_and_unknown_keys_are_named(saved, name):
    refuse(saved, KEYS[name][0], KeyError, KEYS[name][1])


@pytest.mark.parametrize("given", [None, [], "state", torch.ones(3)], ids=str)
def test_what_is_no_state_dict_is_refused(given):
    for load in (new_state().load_state_dict, new_state().__setstate__):
        with pytest.raises(TypeError, match=r"expected what state_dict\(\) gives, got "):
            load(given)


def test_a_state_dict_loads_what_it_saves(saved):
    state = new_state()
    state.load_state_dict(reload(saved))
    assert equal(state.state_dict(), saved)
    assert saved["version"] == 1
    assert saved["errors_of"] == {"rank": 0, "world_size": 1}
    assert saved["num_parameters"] == len(saved["parameters"]) == 5
    first = next(iter(saved["parameters"].values()))
    assert (first["error"].shape, first["direction"].shape) == ((64, 48), (48, 2))


def test_what_is_not_finite_counts_as_zero_when_it_is_saved(saved, monkeypatch):
    """The next step counts non-finite values as zero, too, and a saved state must load again."""
    state, expected = new_state(), copy.deepcopy(saved)
    state.load_state_dict(copy.deepcopy(saved))
    broken = state._states.entries()
    with_nan(next(iter(broken.values()))["error"])
    monkeypatch.setattr(state._states, "entries", lambda: broken)
    next(iter(expected["parameters"].values()))["error"].view(-1)[5] = 0
    assert equal(state.state_dict()["parameters"], expected["parameters"])


def test_expanded_zeros_stay_one_element(saved):
    state, given = new_state(), copy.deepcopy(saved)
    entry = next(iter(given["parameters"].values()))
    entry["error"] = torch.zeros(1, 1).expand(2**20, entry["direction"].shape[0] * 2**20)
    entry["direction"] = torch.zeros(1, 1).expand(entry["error"].shape[1], 2**20)
    state.load_state_dict(given)
    assert state.iter == saved["iter"]


def test_what_was_loaded_is_the_states_own(saved):
    """A state shares no tensors with state_dicts, also before its first step."""
    state, given = new_state(), copy.deepcopy(saved)
    first = next(iter(given["parameters"]))
    state.load_state_dict(given)
    expected = copy.deepcopy(state.state_dict())
    for state_dict in (given, state.state_dict()):
        state_dict["parameters"][first]["direction"].fill_(7)
        if state_dict is not given:
            state_dict["parameters"][first]["error"].fill_(7)
        assert equal(state.state_dict(), expected)
