"""Test that a parameter is identified in another run, by its name or by the first buckets."""

import copy
import re

import pytest
import torch

from gradcomp.compress.parameter_identity import ParameterIdentity

SHAPES = [(2, 3), (3,), (2, 3), (4, 4), (4,)]


def tensors(shapes=SHAPES):
    return [torch.zeros(shape) for shape in shapes]


def brought(identity, parameters, *buckets):
    """Bring the parameters in these buckets; return their indices and the checkpoint's unfit indices."""
    indices, unfit = [], set()
    for bucket in buckets:
        members = [parameters[position] for position in bucket]
        found, dropped = identity.indices_of(members, [tuple(each.shape) for each in members])
        indices.append(found)
        unfit |= dropped
    return indices, unfit


def saved_and_loaded(identity):
    """Return a new identity that has loaded these parameters' entries from a checkpoint."""
    resumed = ParameterIdentity()
    resumed.load(copy.deepcopy(identity.of(range(100))))
    return resumed


def test_names_identify_parameters_in_any_buckets():
    first, now = tensors(), tensors()
    saving = ParameterIdentity()
    saving.name(zip("abcde", first, strict=True))
    (indices, _) = brought(saving, first, [4, 3], [2, 1, 0])
    resumed = saved_and_loaded(saving)
    resumed.name(zip("abcde", now, strict=True))
    (all_at_once,), unfit = brought(resumed, now, [0, 1, 2, 3, 4])
    assert all_at_once == [*indices[1][::-1], *indices[0][::-1]]
    assert unfit == set()
    assert resumed.of(range(100)) == saving.of(range(100))


def test_first_buckets_identify_parameters_where_they_are_the_same():
    saving = ParameterIdentity()
    first = tensors()
    indices, _ = brought(saving, first, [4, 3], [2, 1, 0], [0, 1], [4])
    resumed = saved_and_loaded(saving)
    assert resumed.of(range(100)) == saving.of(range(100)), "also before a bucket comes"
    assert brought(resumed, tensors(), [4, 3], [2, 1, 0]) == (indices[:2], set())
    assert resumed.of(range(100)) == saving.of(range(100))


@pytest.mark.parametrize(
    ("buckets", "num_known"),
    [([[0, 1, 2, 3, 4]], 0), ([[3, 4], [2, 1, 0]], 0), ([[4, 3], [2], [1, 0]], 2), ([[4, 3], [1, 0]], 2)],
    ids=str,
)
def test_other_first_buckets_identify_nothing_from_there_on(buckets, num_known):
    saving = ParameterIdentity()
    brought(saving, tensors(), [4, 3], [2, 1, 0])
    resumed = saved_and_loaded(saving)
    indices, unfit = brought(resumed, tensors(), *buckets)
    assert unfit == set(range(num_known, 5))
    flat = [index for bucket in indices for index in bucket]
    assert flat[:num_known] == list(range(num_known))
    assert min(flat[num_known:]) >= 5, "no index stands for two parameters"


@pytest.mark.parametrize("named_when", ["saving", "resuming"])
def test_names_and_first_buckets_are_not_mixed_up(named_when):
    saving, now, first = ParameterIdentity(), tensors(), tensors()
    if named_when == "saving":
        saving.name(zip("abcde", first, strict=True))
    brought(saving, first, [0, 1, 2, 3, 4])
    resumed = saved_and_loaded(saving)
    if named_when == "resuming":
        resumed.name(zip("abcde", now, strict=True))
    (indices,), _ = brought(resumed, now, [0, 1, 2, 3, 4])
    assert min(indices) >= 5


@pytest.mark.parametrize(
    "names",
    [
        ["module.a.b", "module.c"],
        ["_orig_mod.a.b", "_orig_mod.c"],
        ["module._orig_mod.module.a._checkpoint_wrapped_module.b", "module._orig_mod.module.c"],
        ["_orig_mod.module.a._orig_mod.b", "_orig_mod.module.c"],
    ],
    ids=str,
)
def test_wrappers_are_left_out_of_names(names):
    identity, parameters = ParameterIdentity(), tensors([(2,), (3,)])
    identity.name(zip(names, parameters, strict=True))
    assert [identity.name_of(each) for each in parameters] == ["a.b", "c"]


def test_a_module_of_the_models_that_is_called_module_stays():
    identity, parameters = ParameterIdentity(), tensors([(2,), (3,)])
    identity.name(zip(["module.a", "b"], parameters, strict=True))
    assert [identity.name_of(each) for each in parameters] == ["module.a", "b"]


def test_a_second_living_model_does_not_get_the_first_ones_names():
    identity, first, second = ParameterIdentity(), tensors([(2,)]), tensors([(2,)])
    identity.name([("a", first[0])])
    identity.name([("a", second[0])])
    assert (identity.name_of(first[0]), identity.name_of(second[0])) == ("a", None)
    assert brought(identity, [*first, *second], [0], [1]) == ([[0], [1]], set())


def test_a_model_that_is_made_again_takes_the_deleted_ones_names():
    identity, first = ParameterIdentity(), tensors([(2,)])
    identity.name([("a", first[0])])
    assert brought(identity, first, [0]) == ([[0]], set())
    first.clear()
    second = tensors([(2,)])
    identity.name([("a", second[0])])
    assert brought(identity, second, [0]) == ([[0]], set())


def test_names_may_come_after_the_first_step_unless_a_checkpoint_has_them():
    identity, parameters = ParameterIdentity(), tensors([(2,)])
    brought(identity, parameters, [0])
    identity.name([("a", parameters[0])])
    assert identity.of([0]) == {"names": {0: "a"}, "first_buckets": ()}
    resumed, now = saved_and_loaded(identity), tensors([(2,)])
    brought(resumed, now, [0])
    with pytest.raises(ValueError, match="a bucket has brought a already, without its name"):
        resumed.name([("a", now[0])])


def test_loading_into_a_state_that_has_trained_keeps_its_parameters_where_the_first_buckets_are_the_same():
    identity, parameters = ParameterIdentity(), tensors()
    indices, _ = brought(identity, parameters, [4, 3], [2, 1, 0])
    identity.load(copy.deepcopy(identity.of(range(5))))
    assert brought(identity, parameters, [0, 1, 2, 3, 4])[0] == [[*indices[1][::-1], *indices[0][::-1]]]
    other = ParameterIdentity()
    brought(other, tensors(), [0, 1, 2, 3, 4])
    identity.load(other.of(range(5)))
    _, unfit = brought(identity, parameters, [4, 3])
    assert unfit == set(range(5))


@pytest.mark.parametrize("given", [torch.zeros(2), ("a",), ("a", 3), (1, torch.zeros(2))], ids=repr)
def test_what_has_no_name_is_refused(given):
    with pytest.raises(TypeError, match=re.escape("takes model.named_parameters(), pairs of a name")):
        ParameterIdentity().name([given])
