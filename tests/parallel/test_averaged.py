"""Test that gradcomp.DistributedDataParallel averages gradients in every kind of backward."""

from collections import deque
from contextlib import nullcontext

import pytest
import torch

import gradcomp
from tests.ranks import of_all_ranks
from tests.reducer.models import PLAIN, STATIC, UNUSED, VIEW, Heads, on_device, run_cases
from tests.tolerances import average
from tests.training import Given

EVERY = (PLAIN, UNUSED, STATIC)


# In these scenarios, model is the wrapper, or the module without a wrapper for this rank's own gradients.


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


class Opaque:
    """This user's class hides the outputs in a closure, where the wrapper does not find them."""

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
    """This class holds outputs in attributes, like a distribution."""

    __slots__ = ("all", "others")

    def __init__(self, losses):
        self.all, self.others = deque(losses), None


class HeadsInObject(Heads):
    def forward(self, x):
        losses = super().forward(x)
        return Losses(losses), losses[0].detach()


class HeadsAndDistribution(Heads):
    """This model returns a distribution and a value, like an actor-critic."""

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
    (opaque_outputs, HeadsOpaque, (PLAIN, STATIC)),
    (in_an_object, HeadsInObject, EVERY),
    (of_a_distribution, HeadsAndDistribution, EVERY),
]


def both(rank, scenario, model, options):
    """Return the gradients (without a wrapper, with gradcomp's)."""
    results = []
    for wrap in (lambda module: module, lambda module: gradcomp.DistributedDataParallel(module, **options)):
        torch.manual_seed(0)
        wrapped = wrap(on_device(model()))
        x = on_device(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        scenario(wrapped, x)
        results.append([param.grad.detach().clone() for param in wrapped.parameters()])
    return results


def test_gradients_are_the_mean_of_the_ranks(run_group):
    cases = [(scenario, model, options) for scenario, model, several in AVERAGED for options in several]
    ranks = run_group(run_cases, both, cases)
    for index, (scenario, _, options) in enumerate(cases):
        own, averaged = zip(*(results[index] for results in ranks), strict=True)
        for locals_, averages in zip(zip(*own, strict=True), zip(*averaged, strict=True), strict=True):
            where = f"{scenario.__name__} {options}"
            assert all(torch.equal(each, averages[0]) for each in averages), where
            locals_ = torch.stack(locals_).double()
            bound = 10 * average(torch.float32, len(ranks), locals_.abs().max())
            assert (averages[0] - locals_.mean(0)).abs().max() <= bound, where


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [UNUSED, STATIC], ids=str)
def test_buckets_that_only_some_ranks_use_are_not_left_out(rank, options):
    """Each rank uses a weight of its own, in a bucket of its own, and no rank the third one."""
    model = Given((3,), (3,), (3,))
    ddp = gradcomp.DistributedDataParallel(
        model, bucket_cap_mb=0, skip_all_reduce_unused_params=True, **options
    )
    for _ in range(2):
        ddp.zero_grad()
        ddp([torch.full((3,), rank + 1.0) if index == rank else None for index in range(3)]).backward()
        first, second, third = (param.grad for param in model.parameters())
        assert (first.tolist(), second.tolist(), third) == ([0.5] * 3, [1.0] * 3, None)


@pytest.mark.ranks(2)
def test_outputs_in_objects_are_left_alone_in_no_sync(rank):
    torch.manual_seed(0)
    model = gradcomp.DistributedDataParallel(HeadsInObject())
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    sum(model(x)[0].all).backward()
    model.zero_grad()
    with model.no_sync():
        for _ in range(rank + 1):  # ranks may accumulate different numbers of backwards
            sum(model(x)[0].all).backward()
    local = [param.grad.clone() for param in model.parameters()]
    sum(model(x)[0].all).backward()
    (local, averaged), (other_local, other_averaged) = of_all_ranks(
        (local, [param.grad.clone() for param in model.parameters()])
    )
    assert not any(map(torch.equal, local, other_local))
    assert all(map(torch.equal, averaged, other_averaged))
