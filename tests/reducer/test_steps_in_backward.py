"""Test that optimizers that step in a parameter's hook are refused, and hooks that only look are allowed."""

from itertools import product

import pytest
import torch

from gradcomp.reducer import Reducer
from tests.ranks import of_all_ranks
from tests.reducer.models import MLP, STATIC, UNUSED, VIEW, loss_of
from tests.training import Averaged, parameters_of, train


def as_in_the_tutorial(model):
    optimizers = {param: torch.optim.SGD([param], lr=0.1, foreach=False) for param in model.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


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


def message_of(rank, attach, way, when, options):
    """Attach hooks before the Reducer, after it or after some steps; return the next backward's message."""
    model = MLP()
    if when == "before":
        attach(model)
    averaged = Averaged(model, way, **options)
    if when == "later":
        for _ in range(3):
            loss_of(averaged(torch.ones(2, 20))).backward()
    if when != "before":
        attach(model)
    with pytest.raises(RuntimeError) as caught:
        loss_of(averaged(torch.ones(2, 20))).backward()
    return str(caught.value)


HOOKS = [as_in_the_tutorial, through_data, one_parameter]
TIMES = ["before", "after", "later"]
WAYS = ["reducer", "gradcomp"]


@pytest.mark.ranks(2)
def test_an_optimizer_that_steps_before_the_average_is_refused(rank):
    cases = [(attach, way, time, {}) for attach in HOOKS for way in WAYS for time in TIMES]
    cases += [(torchs, "reducer", time, {}) for time in TIMES]  # the wrapper steps these after the averaging
    cases += [(as_in_the_tutorial, "gradcomp", "after", options) for options in (VIEW, UNUSED, STATIC)]
    for case in cases:
        message = message_of(rank, *case)
        assert message.startswith("parameters "), case
        for part in ("2.weight", "register_post_accumulate_grad_hook", "Step after backward()"):
            assert part in message, case


@pytest.mark.ranks(2)
def test_hooks_that_only_look_are_let(rank):
    for way, when, options in product(WAYS, ("before", "after"), ({}, VIEW)):
        torch.manual_seed(0)
        model, seen = MLP(), []

        def attach(model=model, seen=seen):
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda param: seen.append(float(param.grad.sum())))

        if when == "before":
            attach()
        averaged = Averaged(model, way, **options)
        if when == "after":
            attach()
        train(averaged, lambda forward, step: loss_of(forward((rank + step) * torch.ones(2, 20))), range(4))
        assert len(seen) == 4 * 6, (way, when, options)
        assert torch.equal(*of_all_ranks(parameters_of(model))), (way, when, options)


@pytest.mark.ranks(2)
def test_steps_within_no_sync_are_let(rank):
    """Step within no_sync(), where gradients are each rank's own, and average afterwards."""
    model = MLP()
    reducer = Reducer(model.named_parameters())
    as_in_the_tutorial(model)
    with reducer.no_sync():
        loss_of(model(torch.ones(2, 20))).backward()
    for param in model.parameters():
        param._post_accumulate_grad_hooks.clear()
    loss_of(model(torch.ones(2, 20))).backward()
