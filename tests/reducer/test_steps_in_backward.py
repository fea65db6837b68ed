"""Test that optimizers that step in a parameter's hook are refused, and hooks that only look are allowed."""

from itertools import product

import pytest
import torch

import gradcomp
from gradcomp.reducer import Reducer
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, STATIC, UNUSED, VIEW, loss_of
from tests.training import parameters_of


def as_in_the_tutorial(model):
    optimizers = {param: torch.optim.SGD([param], lr=0.1, foreach=False) for param in model.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def step_alone(model):
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())


def through_data(model):
    def hook(param):
        param.data.sub_(0.1 * param.grad)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def one_parameter(model):
    optimizer = torch.optim.SGD([model[2].weight], lr=0.1)
    model[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())


def torchs(model):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def wrap(model, wrapper, options):
    if wrapper:
        return gradcomp.DistributedDataParallel(model, **options)
    reducer = Reducer(model.named_parameters(), **options)

    def forward(x):
        outputs = model(x)
        if options.get("find_unused_parameters"):
            reducer.prepare_for_backward(outputs)
        return outputs

    return forward


def message_of(rank, attach, is_wrapper, when, options):
    """Attach hooks before the Reducer, after it or after some steps; return the next backward's message."""
    model = MLP()
    if when == "before":
        attach(model)
    forward = wrap(model, is_wrapper, options)
    if when == "later":
        for _ in range(3):
            loss_of(forward(torch.ones(2, 20))).backward()
    if when != "before":
        attach(model)
    with pytest.raises(RuntimeError) as caught:
        loss_of(forward(torch.ones(2, 20))).backward()
    return str(caught.value)


HOOKS = [as_in_the_tutorial, step_alone, through_data, one_parameter]
TIMES = ["before", "after", "later"]


@pytest.mark.ranks(2)
def test_an_optimizer_that_steps_before_the_average_is_refused(rank):
    cases = [(attach, wrapper, time, {}) for attach in HOOKS for wrapper in (False, True) for time in TIMES]
    cases += [(torchs, False, time, {}) for time in TIMES]  # the wrapper steps these after the averaging
    cases += [(as_in_the_tutorial, True, "after", options) for options in (VIEW, UNUSED, STATIC)]
    for case in cases:
        message = message_of(rank, *case)
        assert message.startswith("parameters "), case
        for part in ("2.weight", "register_post_accumulate_grad_hook", "Step after backward()"):
            assert part in message, case


@pytest.mark.ranks(2)
def test_hooks_that_only_look_are_let(rank):
    for is_wrapper, when, options in product((False, True), ("before", "after"), ({}, VIEW)):
        torch.manual_seed(0)
        model, seen = MLP(), []

        def attach(model=model, seen=seen):
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda param: seen.append(float(param.grad.sum())))

        if when == "before":
            attach()
        forward = wrap(model, is_wrapper, options)
        if when == "after":
            attach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(forward(torch.full((2, 20), float(rank + step)))).backward()
            optimizer.step()
        assert len(seen) == 4 * 6, (is_wrapper, when, options)
        assert torch.equal(*of_all_ranks(parameters_of(model))), (is_wrapper, when, options)


@pytest.mark.ranks(2)
def test_steps_within_no_sync_are_let(rank):
    """Step within no_sync(), where gradients are each rank's own, and average afterwards."""
    model = MLP()
    reducer = Reducer(model.named_parameters())
    step_alone(model)
    with reducer.no_sync():
        loss_of(model(torch.ones(2, 20))).backward()
    for param in model.parameters():
        param._post_accumulate_grad_hooks.clear()
    loss_of(model(torch.ones(2, 20))).backward()
