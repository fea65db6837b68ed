"""The three real models of the benchmarks, as lists of shapes, and their DDP buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gradcomp.plan import models as known
from gradcomp.plan.models import (
    BUCKET_CAP_BYTES,
    FIRST_BUCKET_BYTES,
    Parameter,
    Shape,
    buckets_of,
    num_elements,
)

__all__ = [
    "BUCKET_CAP_BYTES",
    "FIRST_BUCKET_BYTES",
    "MODELS",
    "Shape",
    "bert_large",
    "buckets",
    "num_elements",
    "one_bucket",
]


def _shapes(parameters: Callable[[], Iterator[Parameter]]) -> Callable[[], Iterator[Shape]]:
    return lambda: (parameter.shape for parameter in parameters())


bert_large = _shapes(known.bert_large)
MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": _shapes(known.resnet50),
    "bert-large": bert_large,
    "gpt2-medium": _shapes(known.gpt2_medium),
}


def buckets(model: str, dtype: torch.dtype = torch.float32) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model, as DDP has them from its second iteration on."""
    return [list(bucket.shapes) for bucket in buckets_of(list(MODELS[model]()), dtype.itemsize)]


def one_bucket(model: str, dtype: torch.dtype = torch.float32) -> list[Shape]:
    """Return the model's bucket with the most parameters, which is the hardest to flatten."""
    return max(buckets(model, dtype), key=len)
