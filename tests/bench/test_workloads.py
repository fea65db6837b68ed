"""Test the models that bench trains: built-in models, and the results of users' functions."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gradcomp.bench.run import dtype_name
from gradcomp.bench.workloads import BUILT_IN_WORKLOADS, MatrixProducts, default_loss, load_workload
from gradcomp.plan.models import BUILT_IN_MODELS, Parameter, built_in_model

CPU = torch.device("cpu")


def loss_of(workload):
    return workload.loss(workload.module(*workload.arguments, **workload.keywords))


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_every_parameter_of_a_small_model_has_a_gradient(name):
    workload = load_workload(name, CPU)
    loss_of(workload).backward()
    assert all(parameter.grad is not None for parameter in workload.parameters)
    assert sum(parameter.numel() for parameter in workload.parameters) > 10**6


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_bench_trains_the_models_that_plan_knows(name):
    with torch.device("meta"):
        module, inputs = BUILT_IN_WORKLOADS[name]()
    assert [tuple(each.shape) for each in module.parameters()] == built_in_model(name).shapes
    assert module(inputs).device.type == "meta"


def test_a_stand_in_has_a_gradient_and_the_operations_of_every_matrix():
    parameters = [
        Parameter((5, 3), 5 * 3),
        Parameter((5,)),
        Parameter((2, 5, 3, 3), 90 * 16),
        Parameter((4,), 8),
    ]
    module = MatrixProducts(parameters, num_items=2)
    assert module.num_rows == [2, 0, 32, 4]
    assert module.num_inputs() == 32 * 45
    with FlopCounterMode(display=False) as counter:
        loss = module(torch.randn(32 * 45))
    assert counter.get_total_flops() == 2 * 2 * (5 * 3 + 90 * 16)
    loss.backward()
    assert all(each.grad is not None and each.grad.any() for each in module.parameters())


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
        ("module_alone", r"returned a module alone; it must return \(module, inputs\)"),
        ("number", r"returned int; it must return \(module, inputs\)"),
        ("bad_loss", "returned 7 as its loss function, which isn't callable"),
        ("frozen", "has no parameter with a gradient"),
        ("absent", "'absent' of module 'tests.bench.benchmarked' is not there"),
    ],
)
def test_what_is_no_workload_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        named(function)


def test_gradients_have_one_dtype_that_plans_know():
    assert dtype_name(named("tiny")) == "float32"
    with pytest.raises(ValueError, match=r"has parameters in torch\.float64; they must be in one of float32"):
        dtype_name(named("doubles"))


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError, match=r"there is no model 'gtp'; known are resnet50, .*, gpt, mlp, and module:callable"
    ):
        load_workload("gtp", CPU)
