"""Compare gradcomp.DistributedDataParallel with torch's in unusual forwards and backwards."""

import collections
import dataclasses
import warnings
from itertools import product

import pytest
import torch
from torch import nn

import gradcomp
from tests.parallel.beside_torch import assert_alike, batch_of, gradients
from tests.reducer.models import MLP, STATIC, UNUSED, ConvNet, loss_of


@dataclasses.dataclass
class Outputs:
    first: torch.Tensor
    others: list


Pair = collections.namedtuple("Pair", ["x", "y"])


class Nested(nn.Module):
    """This model takes and returns nested containers; the loss may leave out one of its outputs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, pair, *, extra, container):
        first, second = self.one(pair.x), self.two(extra["y"][0])
        return {
            "dict": {"a": first, "b": [second, 3, None]},
            "Pair": Pair(first, second),
            "Outputs": Outputs(first, [second]),
        }[container]


# The two outputs in a container, by its type's name.
CONTAINERS = {
    "dict": lambda outputs: (outputs["a"], outputs["b"][0]),
    "Pair": lambda outputs: (outputs.x, outputs.y),
    "Outputs": lambda outputs: (outputs.first, outputs.others[0]),
}


def nested(cls, rank, container, part, options):
    torch.manual_seed(0)
    model = Nested()
    ddp = cls(model, **options)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    outputs = ddp(Pair(x, None), extra={"y": [2 * x]}, container=container)
    assert type(outputs).__name__ == container
    first, second = CONTAINERS[container](outputs)
    loss = first.square().sum() + (second.sum() if part == "all" else 0.0)
    loss.backward()
    return gradients(model)


@pytest.mark.ranks(2)
def test_nested_inputs_and_outputs(rank):
    for container, options in product(CONTAINERS, ({}, UNUSED)):
        assert_alike(rank, nested, container, "all", options)


@pytest.mark.ranks(2)
def test_outputs_that_the_loss_leaves_out(rank):
    """With find_unused_parameters, their parameters' gradients stay None."""
    for container in ("dict", "Pair"):
        results = assert_alike(rank, nested, container, "first", UNUSED)
        assert [gradient is None for gradient in results] == [False, False, True, True]


def changed_in_place(cls, rank, options):
    torch.manual_seed(0)
    model = Nested()
    ddp = cls(model, **options)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    first, second = ddp(Pair(x, None), extra={"y": [x]}, container="Pair")
    torch.relu_(first)
    second += 1
    (first * second).sum().backward()
    return gradients(model)


def two_backwards(cls, rank):
    """Run a step's backward in two calls, and a second backward of the same graph."""
    torch.manual_seed(0)
    model = Nested()
    ddp = cls(model)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    outputs = ddp(Pair(x, None), extra={"y": [x]}, container="Pair")
    outputs.x.sum().backward()
    outputs.y.square().sum().backward(retain_graph=True)
    results = [gradients(model)]
    outputs.y.square().sum().backward()
    results.append(gradients(model))
    return results


def gradients_of_gradients(cls, rank):
    """Add a penalty on this rank's gradients to the loss."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model)
    loss = loss_of(ddp(batch_of(model, rank, 1)))
    grads = torch.autograd.grad(loss, list(ddp.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in grads)).backward()
    return gradients(ddp)


@pytest.mark.ranks(2)
def test_create_graph(rank):
    """Run backward(create_graph=True); in this version, torch's DDP raises."""
    torch.manual_seed(0)
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model)
    results = []
    for keep in (False, True, True):
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle
            loss_of(ddp(batch_of(model, rank, 0))).backward(create_graph=keep)
        results.append([gradient.detach() for gradient in gradients(model)])
    ddp.zero_grad()
    plain, *kept = results
    for gradients_ in kept:
        assert all(torch.equal(one, other) for one, other in zip(plain, gradients_, strict=True))


def freeze_later(cls, rank):
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, **UNUSED)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    model[0].requires_grad_(False)
    ddp.zero_grad()
    loss_of(ddp(batch_of(model, rank, 1))).backward()
    return gradients(model)


def evaluate_on_one_rank(cls, rank):
    model = ConvNet()
    ddp = cls(model)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    model.eval()
    if rank == 0:
        with torch.no_grad():
            ddp.module(batch_of(model, rank, 1))
    model.train()
    ddp.zero_grad()
    loss_of(ddp(batch_of(model, 0, 2))).backward()
    return len(gradients(model))


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


def reentrant(cls, rank, options):
    torch.manual_seed(0)
    model = Reentrant()
    ddp = cls(model, bucket_cap_mb=0.001, **options)
    results = []
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * rank + step)).requires_grad_()
        ddp(x).square().sum().backward()
        results.append(gradients(model))
    return results


@pytest.mark.ranks(2)
def test_all_as_torchs(rank):
    for scenario in (two_backwards, gradients_of_gradients, freeze_later, evaluate_on_one_rank):
        assert_alike(rank, scenario)
    for options in ({}, UNUSED, STATIC):
        assert_alike(rank, changed_in_place, options)
    for options in ({}, STATIC):
        assert_alike(rank, reentrant, options)
