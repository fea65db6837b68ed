"""Backward and averaging with gradcomp's Reducer beside torch's DistributedDataParallel, at world size 1.

There is one process, so nothing crosses a wire: the times are of the work that a reducer adds to backward.
The model's forward and backward do next to nothing: forward returns zero, and backward sets every parameter's
gradient to a fixed tensor, without a copy. The backend is NCCL on CUDA and gloo on CPU. Gradients are None
before each step. Every model is trained with the defaults, 25 MiB a bucket, and with gradient_as_bucket_view.

A call is a whole step. It includes DDP's forward and setting the gradients to None, which are small.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models
from benchmarks.harness import Case, Setup, rounding_error
from benchmarks.hooks import join_group_of_one
from gradcomp import Reducer
from gradcomp.plan import buckets_of

SMALL: list[models.Shape] = [(64, 64), (256,)] * 200
OPTIONS: dict[str, dict[str, bool]] = {"": {}, ", bucket views": {"gradient_as_bucket_view": True}}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    problems = {"400 small tensors": SMALL}
    if not quick:
        names = ("resnet50", "bert-large") if device.type == "cuda" else ("resnet50",)
        problems |= {name: list(models.MODELS[name]()) for name in names}
    for (model, shapes), (suffix, options) in itertools.product(problems.items(), OPTIONS.items()):
        yield Case(
            "reducer",
            label=model + suffix,
            dtype="float32",
            num_bytes=2 * 4 * models.num_elements(shapes),
            min_launches=len(buckets_of(shapes, torch.float32.itemsize)),
            max_error=rounding_error(torch.float32),
            build=partial(_training, shapes, device, options),
            baseline="torch",
        )


class _FixedGradients(torch.autograd.Function):
    """A function that returns zero. Its backward returns the given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # detach() makes new tensors on the old memory. autograd keeps these; it would copy the given tensors.
        return None, *(gradient.detach() for gradient in ctx.gradients)


class Model(torch.nn.Module):
    """A model with a parameter for each gradient. Its backward yields these gradients."""

    def __init__(self, gradients: Sequence[torch.Tensor]):
        super().__init__()
        self.gradients = gradients
        weights = torch.nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self.registered, self.weights = weights, tuple(weights)  # iterating over a ParameterList is slow

    def forward(self) -> torch.Tensor:
        return _FixedGradients.apply(self.gradients, *self.weights)


def _training(shapes: Sequence[models.Shape], device: torch.device, options: dict[str, bool]) -> Setup:
    join_group_of_one(device)
    right = [torch.randn(shape, device=device) for shape in shapes]
    gradients = [gradient.clone() for gradient in right]
    ours, theirs = Model(gradients), Model(gradients)
    reducer = Reducer(ours.parameters(), **options)
    wrapped = DistributedDataParallel(theirs, **options)
    return Setup(
        {"gradcomp": partial(_step, ours, ours, reducer), "torch": partial(_step, wrapped, theirs, None)},
        reference=lambda: (gradient.double() for gradient in right),
        restore=lambda _: torch._foreach_copy_(gradients, right),
    )


def _step(forward: torch.nn.Module, model: Model, _: Reducer | None) -> list[torch.Tensor]:
    """Run a step and return the gradients. The last argument only keeps the reducer alive."""
    for weight in model.weights:
        weight.grad = None
    forward().backward()
    return [weight.grad for weight in model.weights]
