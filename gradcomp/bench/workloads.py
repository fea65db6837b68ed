"""The model to train in a benchmark: a small one, or one that a user's function returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gradcomp.command_line import load_callable

VOCABULARY, SEQUENCE, BATCH = 256, 64, 4


@dataclass(frozen=True)
class Workload:
    """A model on its device, the inputs of one step, and a function that makes a scalar of the output."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    loss: Callable[[Any], Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that have gradients, all in one dtype."""
        return [each for each in self.module.parameters() if each.requires_grad]


def gpt(width: int = 256, num_blocks: int = 4) -> tuple[nn.Module, Tensor]:
    """Return a GPT, by default of 3.3 million parameters, without positions, and tokens as its input."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    module = nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(num_blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, VOCABULARY, bias=False),
    )
    return module, torch.randint(VOCABULARY, (BATCH, SEQUENCE), dtype=torch.int64, device="cpu")


def mlp(width: int = 1024) -> tuple[nn.Module, Tensor]:
    """Return a perceptron of three layers, 1.9 million parameters, and its input."""
    layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(*layers), layers[0].weight.new_empty(64, 784).normal_()


BUILT_IN_WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": gpt,
    "gpt-medium": partial(gpt, width=1024, num_blocks=24),  # 303 million parameters
    "mlp": mlp,
}


def load_workload(name: str, device: torch.device) -> Workload:
    """Return the workload of this name on a device.

    name: one of BUILT_IN_WORKLOADS, or module:callable. The callable takes no argument and returns
        (module, inputs) or (module, inputs, loss function).
    inputs: one input of the module's forward, a tuple of arguments, or a dict of keyword arguments.
    loss function: makes a scalar of the module's output; by default default_loss.

    Raises ValueError for an unknown name, for a callable that fails or returns anything else, and for
    parameters in several dtypes.
    """
    if name in BUILT_IN_WORKLOADS:
        made: Any = BUILT_IN_WORKLOADS[name]()
    elif ":" not in name:
        raise ValueError(
            f"there is no model {name!r}; known are {', '.join(BUILT_IN_WORKLOADS)}, and module:callable "
            "for a function of yours"
        )
    else:
        made = load_callable(name)()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"model {name!r} returned {type(made).__name__}; it must return (module, inputs) or (module, "
            "inputs, loss function), as a step can't be timed without inputs"
        )
    module, inputs, loss = (*made, default_loss)[:3]
    if not callable(loss):
        raise ValueError(f"model {name!r} returned {loss!r} as its loss function, which isn't callable")
    inputs = tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, inputs)
    keywords = inputs if isinstance(inputs, dict) else {}
    arguments = inputs if isinstance(inputs, tuple) else (() if keywords else (inputs,))
    workload = Workload(name, module.to(device), arguments, keywords, loss)
    if not workload.parameters:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    dtypes = {each.dtype for each in workload.parameters}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"model {name!r} has parameters in {found}; they must be in one dtype")
    return workload


def default_loss(output: Any) -> Tensor:
    """Return the output's own `loss`, or the mean square of its floating-point tensors.

    Raises ValueError for an output without either.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    squares = [
        each.float().square().mean()
        for each in tree_leaves(output)
        if isinstance(each, Tensor) and each.is_floating_point()
    ]
    if not squares:
        raise ValueError(
            f"the model's output, {type(output).__name__}, has neither a loss nor floating-point tensors: "
            "return a loss function, too"
        )
    return torch.stack(squares).sum()
