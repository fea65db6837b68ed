"""Test that a parameter has the same key in another run, by its name or by the first buckets."""

import gc
import re

import pytest
import torch

from gradcomp.compress.parameter_keys import ParameterKeys, is_name

SHAPES = [(2, 3), (3,), (2, 3), (4, 4), (4,)]


def tensors(shapes=SHAPES):
    return [torch.zeros(shape) for shape in shapes]


def brought(keys, parameters, *buckets):
    """Bring the parameters in these buckets; return their keys, bucket by bucket."""
    found = []
    for bucket in buckets:
        members = [parameters[position] for position in bucket]
        found.append(keys.keys_of(members, [tuple(each.shape) for each in members]))
    return found


def flat(buckets):
    return [key for bucket in buckets for key in bucket]


def test_without_names_keys_come_from_the_first_buckets():
    saving, resumed = ParameterKeys(), ParameterKeys()
    expected = brought(saving, first := tensors(), [4, 3], [2, 1, 0], [0, 1], [4])
    assert brought(resumed, tensors(), [4, 3], [2, 1, 0]) == expected[:2]
    assert len(set(flat(expected))) == len(first)
    assert not any(map(is_name, flat(expected)))


@pytest.mark.parametrize(
    ("buckets", "num_known"),
    [([[0, 1, 2, 3, 4]], 0), ([[3, 4], [2, 1, 0]], 0), ([[4, 3], [2], [1, 0]], 2), ([[4, 3], [1, 0]], 2)],
    ids=str,
)
def test_from_another_first_bucket_on_all_keys_are_others(buckets, num_known):
    expected = flat(brought(ParameterKeys(), tensors(), [4, 3], [2, 1, 0]))
    found = flat(brought(ParameterKeys(), tensors(), *buckets))
    assert found[:num_known] == expected[:num_known]
    assert set(found[num_known:]).isdisjoint(expected)


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
    keys, parameters = ParameterKeys(), tensors([(2,), (3,)])
    keys.name(zip(names, parameters, strict=True))
    assert list(map(keys.get, parameters)) == ["a.b", "c"]


def test_a_module_of_the_models_that_is_called_module_stays():
    keys, parameters = ParameterKeys(), tensors([(2,), (3,)])
    keys.name(zip(["module.a", "b"], parameters, strict=True))
    assert list(map(keys.get, parameters)) == ["module.a", "b"]


@pytest.mark.parametrize("named", [True, False])
def test_a_second_living_model_does_not_get_the_first_ones_keys(named):
    keys, first, second = ParameterKeys(), tensors([(2,)]), tensors([(2,)])
    for model in (first, second) if named else ():
        keys.name([("a", model[0])])
    ((one,), (other,)) = brought(keys, [*first, *second], [0], [1])
    assert one != other
    assert is_name(one) == named


@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_is_made_again_takes_the_deleted_ones_keys(named):
    keys, found = ParameterKeys(), []
    for _ in range(3):
        model = tensors([(2,)])
        model.append(model)  # a cycle: garbage, but alive until it is collected
        if named:
            keys.name([("a", model[0])])
        found += brought(keys, model, [0])
        keys.of_step.clear()
        del model
    assert found == [found[0]] * 3


def test_layers_of_the_same_shapes_are_not_searched_for_deleted_ones(monkeypatch):
    """A collection takes up to a second, and a transformer's equal layers have hundreds of buckets."""
    keys, searches = ParameterKeys(), []
    monkeypatch.setattr(gc, "collect", lambda: searches.append(1))
    layers = [tensors([(2, 3), (3,)]) for _ in range(20)]
    assert len(set(flat([brought(keys, layer, [0, 1])[0] for layer in layers]))) == 40
    assert searches == []
    keys.of_step.clear()
    brought(keys, others := tensors([(2, 3), (3,)]), [0, 1])
    brought(keys, more := tensors([(2, 3), (3,)]), [0, 1])
    assert searches == [1]
    assert len(keys.known()) == 40 + len(others) + len(more)


def test_names_may_come_after_the_first_step():
    keys, parameters = ParameterKeys(), tensors([(2,)])
    ((before,),) = brought(keys, parameters, [0])
    assert keys.name([("a", parameters[0])]) == [(before, "a")]
    assert brought(keys, parameters, [0]) == [["a"]]


@pytest.mark.parametrize("given", [None, torch.zeros(2), ("a",), ("a", 3), (1, torch.zeros(2))], ids=repr)
def test_what_has_no_name_is_refused(given):
    with pytest.raises(TypeError, match=re.escape("number_parameters takes model.named_parameters(), got")):
        ParameterKeys().name([given])
