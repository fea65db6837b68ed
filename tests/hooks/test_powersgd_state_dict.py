"""State_dicts that PowerSGD refuses to load, and their messages; a refused one changes nothing."""

import copy

import pytest
import torch

from gradcomp import ops
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from tests.hooks.powersgd_runs import START, equal, new_state, reload, run_steps

NUMEL = 64 * 48 + 7 + 40 * 90 + 64 * 48 + 9
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


def of_bucket(**changes):
    def change(state_dict):
        state_dict["buckets"][0].update(changes)

    return change


def of_kind(**changes):
    def change(state_dict):
        state_dict["buckets"][0]["kind"].update(changes)

    return change


def of_all(**changes):
    return lambda state_dict: state_dict.update(changes)


def of_parameters(**changes):
    return lambda state_dict: state_dict["parameters"].update(changes)


def of_error(function):
    def change(state_dict):
        state_dict["buckets"][0]["error"] = function(state_dict["buckets"][0]["error"])

    return change


def of_directions(function):
    def change(state_dict):
        state_dict["buckets"][0]["directions"] = function(state_dict["buckets"][0]["directions"])

    return change


def each(function):
    """Return a function that maps `function` over a list of tensors, and keeps entries of None."""
    return lambda entries: [entry if entry is None else function(entry) for entry in entries]


def with_nan(tensor):
    tensor[5] = torch.nan
    return tensor


def like_dcp(state_dict):
    """Fill a fresh state's state_dict: torch.distributed.checkpoint loads no buckets into it."""
    state_dict["buckets"] = {}


def like_dcp_with_strings(state_dict):
    state_dict["buckets"] = {"0": state_dict["buckets"][0]}


MISFITS = {
    "error cut short": (
        of_error(lambda e: e[:-1]),
        rf"bucket 0: the error is \[{NUMEL - 1}\] .* \[{NUMEL}\]",
    ),
    "error of one element": (of_error(lambda e: e[:1]), r"bucket 0: the error is \[1\]"),
    "error of NaN": (of_error(with_nan), "bucket 0: the error has values that aren't finite"),
    "error of inf": (of_error(lambda e: e / 0), "bucket 0: the error has values that aren't finite"),
    "error of ints": (
        of_error(lambda e: e.int()),
        r"of torch\.int32, but must be .* of a floating-point dtype",
    ),
    "error in 2-D": (of_error(lambda e: e.view(1, -1)), rf"the error is \[1, {NUMEL}\]"),
    "error of floats": (of_error(lambda e: e.tolist()), "the error is a list, but must be a tensor"),
    "sparse error": (of_error(lambda e: e.to_sparse()), r"the error is torch\.sparse_coo on cpu"),
    "error without values": (of_error(lambda e: e.to("meta")), "on meta, but must be dense and have values"),
    "no error": (lambda d: d["buckets"][0].pop("error"), "bucket 0: has directions but no error"),
    "directions too few": (of_directions(lambda d: d[:-1]), "directions has 4 entries for 5 tensors"),
    "directions of one row": (of_directions(each(lambda d: d[:1])), r"a direction is \[1, 2\]"),
    "directions of NaN": (
        of_directions(each(lambda d: d / 0)),
        "bucket 0: directions has values that aren't finite",
    ),
    "directions in fp16": (of_directions(each(lambda d: d.half())), "a direction is .*float16"),
    "directions as a tensor": (of_directions(lambda d: d[0]), "directions is a Tensor, but must be a list"),
    "shapes too few": (of_bucket(shapes=[(64, 48)]), "has 1 shapes for 5 parameters"),
    "a negative shape": (of_bucket(shapes=[(-1,)] * 5), "a shape is -1, but must be a whole number"),
    "a shape of strings": (of_bucket(shapes=["ab"] * 5), "a shape is a str, but must be a list"),
    "parameters of strings": (of_bucket(parameters=list("abcde")), "parameters is 'a', but must be"),
    "a parameter twice": (of_bucket(parameters=[0, 1, 1, 3, 4]), r"in several places .*\[0, 1, 1, 3, 4\]"),
    "a rank of 0": (
        of_kind(matrix_approximation_rank=0),
        "bucket 0: kind: matrix_approximation_rank is 0, but must be an int and at least 1",
    ),
    "a rate of NaN": (of_kind(min_compression_rate=torch.nan), "min_compression_rate is nan"),
    "another dtype": (
        of_kind(dtype=torch.float64),
        r"is of torch\.float32, but must be of torch\.float64 or a wider",
    ),
    "a dtype of ints": (
        of_kind(dtype=torch.int64),
        "dtype is torch.int64, but must be a floating-point dtype",
    ),
    "another rank": (of_kind(matrix_approximation_rank=3), r"a direction is \[48, 2\] .* \[48, 3\]"),
    "a square": (of_kind(square=True), "a direction is a list, but must be a tensor"),
    "a future version": (of_all(version=2), "version is 2, but this gradcomp reads 1"),
    "a version of True": (of_all(version=True), "version is True, but this gradcomp reads 1"),
    "a version of None": (of_all(version=None), "version is None, but this gradcomp reads 1"),
    "a parameter that nobody knows": (
        of_parameters(first_buckets=[]),
        r"the buckets have the parameters \[0, 1, 2, 3, 4\], but names and first_buckets identify \[\]",
    ),
    "a parameter known twice": (of_parameters(names={3: "a"}), "identify .* each must be there once"),
    "a name given twice": (of_parameters(names={7: "a", 8: "a"}), r"names has \['a', 'a'\], but must"),
    "a name of ints": (of_parameters(names={7: 1}), r"names has \[1\], but must have a different str"),
    "first buckets as a dict": (of_parameters(first_buckets={}), "first_buckets is a dict, but must be"),
    "a first bucket of two shapes": (
        of_parameters(first_buckets=[{"parameters": [7], "shapes": [(1,), (2,)]}]),
        "a first bucket has 2 shapes for 1 parameters",
    ),
    "an owner of no world": (
        of_all(errors_of={"rank": 0, "world_size": 0}),
        r"errors_of\['world_size'\] is 0",
    ),
    "an owner outside": (
        of_all(errors_of={"rank": 2, "world_size": 2}),
        "errors_of is rank 2 of a world size of 2",
    ),
    "an owner by name": (of_all(errors_of="rank 0"), "errors_of is a str, but must be a dict"),
    "buckets as a list": (of_all(buckets=[]), "buckets is a list, but must be a dict"),
    "filled by DCP": (like_dcp, rf"should hold .* but holds .*{NOT_THROUGH_DCP}"),
    "filled by DCP with strings": (like_dcp_with_strings, rf"has the key '0'.*{NOT_THROUGH_DCP}"),
}
KEYS = {
    "a missing key": (lambda d: d.pop("options"), "the state_dict lacks options"),
    "missing keys": (lambda d: [d.pop("iter"), d.pop("buckets")], "the state_dict lacks iter, buckets"),
    "an unknown key": (of_all(warmstart=True), "the state_dict has the unknown 'warmstart'"),
    "both": (lambda d: d.update(a=d.pop("iter")), "the state_dict lacks iter and has the unknown 'a'"),
    "of a bucket": (lambda d: d["buckets"][0].pop("shapes"), "bucket 0 lacks shapes"),
    "of the options": (lambda d: d["options"].pop("warm_start"), "options lacks warm_start"),
    "of a kind": (
        lambda d: d["buckets"][0]["kind"].pop("warm_start"),
        "bucket 0: kind lacks warm_start",
    ),
    "no version": (lambda d: d.pop("version"), "the state_dict lacks version"),
    "of the parameters": (lambda d: d["parameters"].pop("names"), "parameters lacks names"),
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
    assert saved["contents"] == {"buckets": [0]}


def test_what_is_not_finite_counts_as_zero_when_it_is_saved(saved, monkeypatch):
    """The next step counts non-finite values as zero, too, and a saved state must load again."""
    state, expected = new_state(), copy.deepcopy(saved)
    state.load_state_dict(copy.deepcopy(saved))
    _, (memory,) = broken = state._memories.saved()
    with_nan(memory.saved["error"])
    monkeypatch.setattr(state._memories, "saved", lambda: broken)
    expected["buckets"][0]["error"][5] = 0
    assert equal(state.state_dict()["buckets"], expected["buckets"])


def test_what_was_loaded_is_the_states_own(saved):
    """A state shares no tensors with state_dicts, also before its first step and with an expanded tensor."""
    state, given = new_state(), copy.deepcopy(saved)
    given["buckets"][0]["error"] = torch.ones(1).expand(NUMEL)
    state.load_state_dict(given)
    expected = copy.deepcopy(state.state_dict())
    for state_dict in (given, state.state_dict()):
        state_dict["buckets"][0]["directions"][0].fill_(7)
        if state_dict is not given:
            state_dict["buckets"][0]["error"].fill_(7)
        assert equal(state.state_dict(), expected)
