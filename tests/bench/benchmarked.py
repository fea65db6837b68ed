"""Workloads that tests of bench name on its command line."""

import os
from typing import Any

import torch
from torch import Tensor, nn

NUM_INPUTS = 40


def tiny() -> tuple[nn.Module, Tensor]:
    """Return a model of three buckets at 0.02 MB, and inputs."""
    module = nn.Sequential(nn.Linear(NUM_INPUTS, 300), nn.ReLU(), nn.Linear(300, 50), nn.Linear(50, 3))
    return module, torch.ones(2, NUM_INPUTS)


class Output:
    """An output with its own loss, like the outputs of Hugging Face's models."""

    def __init__(self, loss: Tensor):
        self.loss = loss


class WithKeywords(nn.Linear):
    def forward(self, *, x: Tensor, scale: float) -> Any:  # type: ignore[override]
        return Output((scale * super().forward(x)).sum())


def with_keywords() -> tuple[nn.Module, dict[str, Any]]:
    return WithKeywords(3, 2), {"x": torch.ones(5, 3), "scale": 2.0}


class Bilinear(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), super().forward(y)


def with_arguments() -> Any:
    return Bilinear(3, 2), (torch.ones(5, 3), torch.zeros(5, 3))


def with_loss() -> Any:
    return nn.Linear(3, 2), torch.ones(5, 3), torch.sum


def module_alone() -> nn.Module:
    return nn.Linear(3, 2)


def number() -> int:
    return 7


def frozen() -> Any:
    return nn.Linear(3, 2).requires_grad_(False), torch.ones(5, 3)


def bad_loss() -> Any:
    return nn.Linear(3, 2), torch.ones(5, 3), 7


def two_dtypes() -> Any:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).double()), torch.ones(5, 3)


def fails_on_rank_1() -> Any:
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("no data here")
    return tiny()


def dies_on_rank_1() -> Any:
    """Return a model that ends rank 1's process in its forward."""
    module, inputs = tiny()
    if os.environ["RANK"] == "1":
        module.register_forward_pre_hook(lambda *_: os._exit(7))
    return module, inputs
