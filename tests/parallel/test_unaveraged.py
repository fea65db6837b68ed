"""Test gradients that gradcomp.DistributedDataParallel doesn't average: it raises, or agrees with torch's."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from tests.parallel.beside_torch import assert_alike, gradients, run_quietly
from tests.reducer.models import PLAIN, STATIC, UNUSED, Heads
from tests.training import drawn

EVERY = (PLAIN, UNUSED, STATIC)


def backward_of_forward(ddp, x):
    sum(ddp(x)).backward()


def converted(ddp, x):
    ddp.module.double()
    backward_of_forward(ddp, x.double())


def converted_and_back(ddp, x):
    ddp.module.double().float()
    backward_of_forward(ddp, x)


def converted_in_part(ddp, x):
    ddp.module.b.double().float()
    backward_of_forward(ddp, x)


def converted_later(ddp, x):
    backward_of_forward(ddp, x)
    converted_and_back(ddp, x)


def given_a_layer(ddp, x):
    ddp.module.b = nn.Sequential(ddp.module.b, nn.Linear(2, 2))
    backward_of_forward(ddp, x)


def given_another_parameter(ddp, x):
    ddp.module.b.weight = nn.Parameter(torch.ones(2, 4))
    backward_of_forward(ddp, x)


def loaded_by_assignment(ddp, x):
    ddp.load_state_dict({name: each.clone() for name, each in ddp.state_dict().items()}, assign=True)
    backward_of_forward(ddp, x)


def given_another_module(ddp, x):
    ddp.module = Heads()
    backward_of_forward(ddp, x)


class HeadsFrozen(Heads):
    def __init__(self):
        super().__init__()
        self.b.requires_grad_(False)


def unfrozen(ddp, x):
    ddp.module.b.requires_grad_(True)
    backward_of_forward(ddp, x)


def auxiliary_loss_of_a_part(ddp, x):
    auxiliary, main = ddp(x)
    auxiliary.backward(retain_graph=True)
    main.backward()


def part_of_a_backward(ddp, x):
    ddp(x)[0].backward()
    ddp.finalize_backward()


def frozen(ddp, x):
    ddp.module.b.requires_grad_(False)
    backward_of_forward(ddp, x)
    ddp(x)


def penalty_on_averages(ddp, x):
    sum(ddp(x)).backward(create_graph=True)
    sum(param.grad.square().sum() for param in ddp.parameters()).backward()


def broken_off_at_the_end(ddp, x):
    x = x.clone().requires_grad_() * 1  # the backward of this product runs last
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sum(ddp(x)).backward()
    ddp(x)


def static_graph_too_late(ddp, x):
    loss = sum(ddp(x))
    ddp._set_static_graph()
    loss.backward()


CONVERTED = "no longer where gradients are averaged.* moved or converted"
LEFT_OUT = "are not averaged, and have gradients of this rank's own"
RAISING = [
    (converted, EVERY, "trunk.weight, .*" + CONVERTED),
    (converted_and_back, EVERY, CONVERTED),
    (converted_in_part, EVERY, "parameters b.weight, b.bias are " + CONVERTED),
    (converted_later, EVERY, CONVERTED),
    (given_a_layer, EVERY, "parameters b.1.weight, b.1.bias " + LEFT_OUT),
    (given_another_parameter, EVERY, "parameters b.weight " + LEFT_OUT),
    (loaded_by_assignment, EVERY, "parameters trunk.weight, .*" + LEFT_OUT),
    (given_another_module, EVERY, LEFT_OUT),
    (unfrozen, EVERY, "parameters b.weight, b.bias " + LEFT_OUT),
    (auxiliary_loss_of_a_part, (PLAIN,), "ready only once.*add the losses up.*find_unused_parameters=True"),
    (auxiliary_loss_of_a_part, (STATIC,), "Your training graph has changed"),
    (part_of_a_backward, (PLAIN,), "Expected to have finished reduction .*did not reach 2 parameters"),
    (frozen, (PLAIN,), "did not reach 2 parameters: b.weight, b.bias.*frozen"),
    (penalty_on_averages, EVERY, "element 0 of tensors does not require grad"),
    (broken_off_at_the_end, (PLAIN, UNUSED), "reached all parameters, but did not come to its end"),
    (static_graph_too_late, (PLAIN,), "set_static_graph\\(\\) should be called before training loop starts"),
]


@pytest.mark.ranks(2)
def test_what_is_not_averaged_is_an_error_on_every_rank(rank):
    for scenario, several, message in RAISING:
        for options in several:
            torch.manual_seed(0)
            model = HeadsFrozen() if scenario is unfrozen else Heads()
            ddp = gradcomp.DistributedDataParallel(model, **options)
            x = drawn(5, 3, rank=rank)
            with pytest.raises(RuntimeError, match=f"(?s){message}"):
                run_quietly(lambda scenario, _, *given: scenario(*given), scenario, rank, ddp, x)


# torch's wrapper and ours leave these gradients local, on purpose.


def module_itself(ddp, x):
    sum(ddp.module(x)).backward()


def functional_call(ddp, x):
    values = {f"module.{name}": param * 2 for name, param in ddp.module.named_parameters()}
    sum(torch.func.functional_call(ddp, values, (x,))).backward()


def functional_call_with_parameters(ddp, x):
    values = {f"module.{name}": nn.Parameter(param.detach()) for name, param in ddp.module.named_parameters()}
    sum(torch.func.functional_call(ddp, values, (x,))).backward()


def forward_in_no_sync(ddp, x):
    with ddp.no_sync():
        loss = sum(ddp(x))
    loss.backward()


def autograd_grad(ddp, x):
    gradients = torch.autograd.grad(sum(ddp(x)), list(ddp.parameters()))
    for param, gradient in zip(ddp.parameters(), gradients, strict=True):
        param.grad = gradient


LOCAL = (module_itself, functional_call, functional_call_with_parameters, forward_in_no_sync, autograd_grad)


def trained_locally(cls, rank, scenario, options):
    torch.manual_seed(0)
    ddp = cls(Heads(), **options)
    scenario(ddp, drawn(5, 3, rank=rank))
    dist.barrier()
    return gradients(ddp)


@pytest.mark.ranks(2)
def test_what_torch_leaves_to_each_rank_is_left_here(rank):
    for scenario, options in product(LOCAL, (PLAIN, UNUSED)):
        assert_alike(rank, trained_locally, scenario, options)
