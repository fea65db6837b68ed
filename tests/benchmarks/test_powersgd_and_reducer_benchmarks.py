"""Test that the benchmarks of PowerSGD and the reducers check before they time, and have all GPU cases."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import models, powersgd, reducer
from benchmarks.harness import Case, WrongResultError, check, rounding_error
from gradcomp import ops

CPU = torch.device("cpu")


def test_powersgd_on_a_gpu_covers_models_ranks_and_dtypes():
    cases = [case for case in bench.discover(torch.device("cuda"), False) if case.name == "powerSGD_hook"]
    hooks = {(case.label, case.dtype): case for case in cases}
    problems = {(label.split(",")[0], label.rpartition("r=")[2]) for label, _ in hooks}
    assert problems >= set(product(models.MODELS, ("1", "4", "32")))
    assert {dtype for _, dtype in hooks} == {"float32", "bfloat16"}
    whole = hooks["bert-large, 38 buckets, r=1", "float32"]
    # 20 B per element of a matrix, 16 B per element of a vector. All matrices except the token types are
    # compressed.
    shapes = list(models.bert_large())
    vectors = models.num_elements([shape for shape in shapes if len(shape) == 1 or shape[0] == 2])
    assert whole.num_bytes == 20 * models.num_elements(shapes) - 4 * vectors
    assert whole.num_elements == models.num_elements(shapes)
    assert whole.num_buckets == len(models.buckets("bert-large", torch.float32)) > 1
    assert whole.min_launches == 5 * whole.num_buckets


SMALL = [(40, 30), (7,), (40, 30), (64, 2, 3, 3), (5, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_powersgd_is_checked_before_it_is_timed(dtype, group_of_one, monkeypatch):
    monkeypatch.setattr(ops, "_INTERPRETED", False)  # plain torch, for hundreds of steps
    problem = powersgd.Problem("small", (tuple(SMALL), tuple(SMALL[:2])), dtype, 2, CPU)
    case = problem.case("")
    setup = case.build()
    assert check(case, setup)
    # Like in the timed rounds, each call works on the buffers that the last call left. No result may vanish,
    # become NaN or grow.
    for provider in setup.providers.values():
        for _ in range(300):
            provider()
        for result, reference in zip(provider(), setup.reference(), strict=True):
            assert 0.5 < result.double().norm() / reference.norm() < 2

    def wrong() -> list[torch.Tensor]:
        return [result * (1 + 2 * case.max_error) for result in setup.providers["gradcomp"]()]

    with pytest.raises(WrongResultError):
        check(case, replace(setup, providers={"gradcomp": wrong}))


# --- the reducers ---


@pytest.mark.parametrize("options", reducer.OPTIONS.values(), ids=repr)
def test_reducers_are_checked_before_they_are_timed(options, group_of_one):
    setup = reducer._training(SMALL, CPU, options)
    bound = rounding_error(torch.float32)
    case = Case("", "", "", 0, bound, lambda: setup, "torch")
    assert set(check(case, setup)) == {"gradcomp", "torch"}
    for provider in setup.providers.values():
        for _ in range(3):
            provider()
    assert check(case, setup)  # earlier calls leave no state that changes results

    def wrong() -> list[torch.Tensor]:
        return [result * (1 + 2 * bound) for result in setup.providers["gradcomp"]()]

    with pytest.raises(WrongResultError):
        check(case, replace(setup, providers={"wrong": wrong}))


def test_both_reducers_train_the_same_model_without_copies(group_of_one):
    gradients = [torch.randn(shape) for shape in SMALL]
    model = reducer.Model(gradients)
    for _ in range(2):
        results = reducer._step(model, model, None)
        assert [result.data_ptr() for result in results] == [each.data_ptr() for each in gradients]


def test_reducers_on_a_gpu_average_bert_large():
    names = ["400 small tensors", "resnet50", "bert-large"]
    labels = {
        quick: {each.label for each in bench.discover(torch.device("cuda"), quick) if each.name == "reducer"}
        for quick in (False, True)
    }
    assert labels == {
        False: {name + suffix for name in names for suffix in ("", ", bucket views")},
        True: {"400 small tensors", "400 small tensors, bucket views"},
    }
