"""gradcomp.DistributedDataParallel: whatever backward comes through it, gradients are averaged, or an error says why not."""

import copy
from collections import deque
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from tests.distributed.beside_torch import CLASSES, run_quietly
from tests.distributed.ranks import run_ranks
from tests.distributed.reducer_models import STATIC, UNUSED, VIEW, in_turn
from tests.tolerances import average

PLAIN = {}
EVERY = (PLAIN, UNUSED, STATIC)


class Heads(nn.Module):
    """A trunk and two heads, with losses that aren't linear in the parameters."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden).square().sum(), self.b(hidden).square().sum()


# Scenarios: model is the wrapped module, or the module itself, which then gives this rank's gradients.


def auxiliary_loss_first(model, x):
    auxiliary, main = model(x)
    auxiliary.backward(retain_graph=True)
    main.backward()


def two_losses_of_everything(model, x):
    a, b = model(x)
    (a + b).backward(retain_graph=True)
    (a * b).backward()


def two_forwards_then_two_backwards(model, x):
    first, second = model(x), model(2 * x)
    sum(first).backward()
    sum(second).backward()


def no_sync_between(model, x):
    first = model(x)
    with model.no_sync() if hasattr(model, "no_sync") else torch.enable_grad():
        sum(model(2 * x)).backward()
    sum(first).backward()


def module_itself_between(model, x):
    first = model(x)
    sum(getattr(model, "module", model)(2 * x)).backward()
    sum(first).backward()


def autograd_grad_first(model, x):
    loss = sum(model(x))
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def penalty_on_gradients_last(model, x):
    loss = sum(model(x))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward(retain_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


def frozen_and_back(model, x):
    for requires_grad in (False, True):
        model.requires_grad_(requires_grad)
    sum(model(x)).backward()
    model.requires_grad_(True)
    sum(model(x)).backward()


def raised_before_any_parameter(model, x):
    outputs = model(x)
    handle = outputs[0].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outputs[0].backward(retain_graph=True)
    handle.remove()
    sum(outputs).backward()


def copied_in_between(model, x):
    sum(model(x)).backward()
    other = copy.deepcopy(model)
    sum(other(x)).backward()
    for param, copied in zip(model.parameters(), other.parameters(), strict=True):
        param.grad = copied.grad


class Opaque:
    """Outputs of a class of the user's own, in which nobody finds tensors."""

    def __init__(self, losses):
        self.losses = lambda: losses


class HeadsOpaque(Heads):
    def forward(self, x):
        return Opaque(super().forward(x))


def opaque_outputs(model, x):
    outputs = model(x)
    sum(outputs.losses()).backward(retain_graph=True)
    sum(outputs.losses()).backward()


class Losses:
    """Outputs in attributes, as a distribution has them."""

    __slots__ = ("all", "others")

    def __init__(self, losses):
        self.all, self.others = deque(losses), None


class HeadsInObject(Heads):
    def forward(self, x):
        losses = super().forward(x)
        return Losses(losses), losses[0].detach()


class HeadsAndDistribution(Heads):
    """As an actor-critic's: a distribution, and a value."""

    def forward(self, x):
        losses = super().forward(x)
        return torch.distributions.Normal(sum(losses), 1.0), losses[0]


def in_an_object(model, x):
    first, second = model(x)[0], model(2 * x)[0]
    with getattr(model, "no_sync", nullcontext)():
        model(x)
    sum(second.all).backward()
    sum(first.all).backward(retain_graph=True)
    sum(first.all).backward()


def of_a_distribution(model, x):
    distribution, _ = model(x)
    with getattr(model, "no_sync", nullcontext)():
        model(x)
    distribution.log_prob(torch.ones(())).sum().backward()


AVERAGED = [
    (auxiliary_loss_first, Heads, (UNUSED, UNUSED | VIEW)),
    (two_losses_of_everything, Heads, (*EVERY, VIEW)),
    (two_forwards_then_two_backwards, Heads, EVERY),
    (no_sync_between, Heads, EVERY),
    (module_itself_between, Heads, EVERY),
    (autograd_grad_first, Heads, EVERY),
    (penalty_on_gradients_last, Heads, (PLAIN, STATIC)),
    (frozen_and_back, Heads, EVERY),
    (raised_before_any_parameter, Heads, EVERY),
    (copied_in_between, Heads, EVERY),
    (opaque_outputs, HeadsOpaque, (PLAIN, STATIC)),
    (in_an_object, HeadsInObject, EVERY),
    (of_a_distribution, HeadsAndDistribution, EVERY),
]


def both(rank, scenario, model, options):
    """(this rank's own gradients, the wrapped module's)."""
    results = []
    for wrap in (lambda module: module, lambda module: gradcomp.DistributedDataParallel(module, **options)):
        torch.manual_seed(0)
        wrapped = wrap(model())
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
        scenario(wrapped, x)
        results.append([param.grad.detach().clone() for param in wrapped.parameters()])
    return results


def test_gradients_are_the_mean_of_the_ranks():
    cases = [(scenario, model, options) for scenario, model, several in AVERAGED for options in several]
    ranks = run_ranks(in_turn, 2, both, cases)
    for number, (scenario, _, options) in enumerate(cases):
        for own, averaged, other, averaged_there in zip(*ranks[0][number], *ranks[1][number], strict=True):
            where = f"{scenario.__name__} {options}"
            assert torch.equal(averaged, averaged_there), where
            mean = (own.double() + other.double()) / 2
            bound = 10 * average(torch.float32, 2, max(own.abs().max(), other.abs().max()))
            assert (averaged - mean).abs().max() <= bound, where


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
    auxiliary_loss_first(ddp, x)


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
    x = x.clone().requires_grad_() * 1  # whose backward comes last
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


def what_it_says(rank, scenario, options):
    torch.manual_seed(0)
    model = HeadsFrozen() if scenario is unfrozen else Heads()
    ddp = gradcomp.DistributedDataParallel(model, **options)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    try:
        run_quietly(lambda *_: scenario(ddp, x), None, rank)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_what_is_not_averaged_is_an_error_on_every_rank():
    cases = [(scenario, options, message) for scenario, several, message in RAISING for options in several]
    ranks = run_ranks(in_turn, 2, what_it_says, [case[:2] for case in cases])
    for messages in ranks:
        for (scenario, options, expected), message in zip(cases, messages, strict=True):
            with pytest.raises(RuntimeError, match=f"(?s){expected}"):
                raise RuntimeError(f"{message} [{scenario.__name__} {options}]")


# What torch leaves to each rank on purpose, and this does, too.


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


def on_each(rank, scenario, options):
    results = []
    for cls in CLASSES.values():
        torch.manual_seed(0)
        ddp = run_quietly(lambda cls, _: cls(Heads(), **options), cls, rank)
        scenario(ddp, torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        results.append([param.grad for param in ddp.module.parameters()])
        dist.barrier()
    return results


def test_what_torch_leaves_to_each_rank_is_left_here():
    cases = [(scenario, options) for scenario in LOCAL for options in (PLAIN, UNUSED)]
    for results in run_ranks(in_turn, 2, on_each, cases):
        for (scenario, _), (theirs, ours) in zip(cases, results, strict=True):
            for their, our in zip(theirs, ours, strict=True):
                assert (their is None) == (our is None), scenario.__name__
                assert our is None or torch.equal(their, our), scenario.__name__


class Branch(nn.Module):
    """Two layers of one size, and a bucket each; rank 0 uses the first, rank 1 the second."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, number):
        return self.layers[number](x)


def skip_other_buckets(rank, options):
    torch.manual_seed(0)
    model = Branch()
    ddp = gradcomp.DistributedDataParallel(
        model, bucket_cap_mb=0, skip_all_reduce_unused_params=True, **options
    )
    results = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 3), rank + 1.0), rank).sum().backward()
        results.append([param.grad for param in model.parameters()])
    return results


@pytest.mark.parametrize("options", [UNUSED, STATIC], ids=str)
def test_buckets_that_only_some_ranks_use_are_not_left_out(options):
    first, second = run_ranks(skip_other_buckets, 2, options)
    for ours, theirs in zip(first, second, strict=True):
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if number >= 4:
                assert our is their is None  # the third layer, which neither rank uses
            else:
                assert torch.equal(our, their)
        assert torch.equal(ours[0], torch.full((3, 3), 0.5))
        assert torch.equal(ours[2], torch.full((3, 3), 1.0))


def accumulate_in_an_object(rank):
    """Whether ranks have the same gradients after a backward in no_sync(), and after the synchronised one."""
    torch.manual_seed(0)
    model = gradcomp.DistributedDataParallel(HeadsInObject())
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    sum(model(x)[0].all).backward()
    model.zero_grad()
    with model.no_sync():
        for _ in range(rank + 1):  # the ranks need not accumulate alike
            sum(model(x)[0].all).backward()
    local = [param.grad.clone() for param in model.parameters()]
    sum(model(x)[0].all).backward()
    return local, [param.grad.clone() for param in model.parameters()]


def test_outputs_in_objects_are_left_alone_in_no_sync():
    (local, averaged), (other_local, other_averaged) = run_ranks(accumulate_in_an_object, 2)
    assert not any(map(torch.equal, local, other_local))
    assert all(map(torch.equal, averaged, other_averaged))
