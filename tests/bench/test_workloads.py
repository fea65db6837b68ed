"""Test the models that bench trains: built-in models, and the results of users' functions."""

import pytest
import torch

from gradcomp.bench.workloads import BUILT_IN_WORKLOADS, default_loss, load_workload

CPU = torch.device("cpu")


def loss_of(workload):
    return workload.loss(workload.module(*workload.arguments, **workload.keywords))


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_every_parameter_of_a_small_model_has_a_gradient(name):
    workload = load_workload(name, CPU)
    loss_of(workload).backward()
    assert all(parameter.grad is not None for parameter in workload.parameters)
    assert sum(parameter.numel() for parameter in workload.parameters) > 10**6


def test_the_large_gpt_has_the_size_that_is_said():
    with torch.device("meta"):
        module, inputs = BUILT_IN_WORKLOADS["gpt-medium"]()
    assert round(sum(each.numel() for each in module.parameters()) / 1e6) == 303
    assert module(inputs).shape == (*inputs.shape, 256)


def named(function):
    return load_workload(f"tests.bench.benchmarked:{function}", CPU)


def test_inputs_are_one_or_a_tuple_or_a_dict():
    assert loss_of(named("tiny")).ndim == 0
    keywords, arguments = named("with_keywords"), named("with_arguments")
    assert keywords.arguments == ()
    assert keywords.keywords.keys() == {"x", "scale"}
    assert len(arguments.arguments) == 2
    assert arguments.keywords == {}
    loss_of(arguments).backward()


def test_the_loss_is_the_given_one_or_the_outputs_or_a_mean_square():
    keywords, given = named("with_keywords"), named("with_loss")
    outputs = keywords.module.weight.sum(1) + keywords.module.bias
    assert torch.allclose(loss_of(keywords), 2.0 * 5 * outputs.sum())
    assert torch.equal(loss_of(given), given.module(given.arguments[0]).sum())
    assert default_loss({"loss": torch.tensor(3.0), "logits": torch.ones(2)}) == 3
    assert default_loss((torch.tensor([1.0, 3.0]), [torch.tensor([2.0])], torch.tensor([9]))) == 5 + 4
    with pytest.raises(ValueError, match="has neither a loss nor floating-point tensors"):
        default_loss(torch.tensor([1]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("module_alone", r"returned Linear; it must return \(module, inputs\)"),
        ("number", r"returned int; it must return \(module, inputs\)"),
        ("bad_loss", "returned 7 as its loss function, which isn't callable"),
        ("frozen", "has no parameter with a gradient"),
        ("two_dtypes", r"has parameters in torch\.float32, torch\.float64; they must"),
        ("absent", "'absent' of module 'tests.bench.benchmarked' is not there"),
    ],
)
def test_what_is_no_workload_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        named(function)


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError, match=r"there is no model 'gtp'; known are gpt, gpt-medium, mlp, and module:callable"
    ):
        load_workload("gtp", CPU)
