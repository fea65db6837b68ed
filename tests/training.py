"""Models, ways to average their gradients, and training: what tests of many folders share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.hooks.powerSGD_hook import PowerSGDState

# The classes of the ways "torch" and "gradcomp"; the others are "reducer", "average_" and "none".
DDPS = {"torch": DistributedDataParallel, "gradcomp": gradcomp.DistributedDataParallel}
WAYS = (*DDPS, "reducer", "average_")


class Given(nn.Module):
    """This model's gradients are its inputs. It leaves out weights without an input, or with None."""

    def __init__(self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
        given = zip(self.weights, gradients, strict=False)
        return sum((weight * each).sum() for weight, each in given if each is not None).real


class Layers(nn.Module):
    """This model has tanh layers of these sizes. It leaves out those that a call skips."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor, skips: Sequence[int] = ()) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in skips:
                x = torch.tanh(layer(x))
        return x


class Averaged:
    """A model whose gradients are averaged over the ranks in one of WAYS, or not at all.

    options: of the wrapper or Reducer. Without a hook, gradients are all-reduced.
    """

    def __init__(
        self, model: nn.Module, way: str = "torch", hook: Any = None, state: Any = None, **options: Any
    ):
        self.model, self.way, self.hook, self.state = model, way, hook, state
        self.averager = None
        if way in DDPS:
            self.averager = DDPS[way](model, **options)
        elif way == "reducer":
            self.averager = gradcomp.Reducer(model.named_parameters(), **options)
        if self.averager is not None and hook is not None:
            self.averager.register_comm_hook(state, hook)

    def __call__(self, *inputs: Any) -> Any:
        if self.way in DDPS:
            return self.averager(*inputs)
        outputs = self.model(*inputs)
        if self.way == "reducer":
            self.averager.prepare_for_backward(outputs)
        return outputs

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.averager is None else self.averager.no_sync()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self.way == "average_":
            gradcomp.average_([p.grad for p in self.parameters()], self.hook, self.state)


def train(
    model: nn.Module | Averaged,
    loss_of: Callable[[Any, int], torch.Tensor],
    steps: Iterable[int],
    lr: float = 0.1,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before_update: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """Train; return the losses.

    loss_of: called with the model and the step.
    optimizer: SGD by default.
    before_update: called with every step when its gradients are averaged.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        model.backward(loss) if isinstance(model, Averaged) else loss.backward()
        before_update(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def drawn(*shape: int, rank: int = 0, step: int = 0) -> torch.Tensor:
    """Return random numbers of a rank's step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def parameters_of(model: nn.Module | Averaged) -> torch.Tensor:
    """Return a copy of all parameters, flat, on the CPU."""
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def gradients_of(model: nn.Module | Averaged) -> torch.Tensor:
    """Return a copy of all gradients that there are, flat, on the CPU."""
    return torch.cat([p.grad.detach().cpu().flatten() for p in model.parameters() if p.grad is not None])


def power_sgd(group: Any = None, rank: int = 2, start: int = 2, **options: Any) -> PowerSGDState:
    return PowerSGDState(group, rank, start, **options)
