"""The parameter shapes of three real models, and the buckets that DDP cuts them into.

The shapes are in registration order, written out so that nothing has to be downloaded or installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

Shape = tuple[int, ...]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES = 2**20
BUCKET_CAP_BYTES = 25 * 2**20


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of torchvision's resnet50: 161 parameters, 25,557,032 elements."""
    yield (64, 3, 7, 7)
    yield from _weight_and_bias(64)
    channels = 64
    for num_blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(num_blocks):
            yield (width, channels, 1, 1)
            yield from _weight_and_bias(width)
            yield (width, width, 3, 3)
            yield from _weight_and_bias(width)
            yield (4 * width, width, 1, 1)
            yield from _weight_and_bias(4 * width)
            if block == 0:  # the downsampling shortcut
                yield (4 * width, channels, 1, 1)
                yield from _weight_and_bias(4 * width)
            channels = 4 * width
    yield (1000, 2048)
    yield (1000,)


def bert_large() -> Iterator[Shape]:
    """Yield the shapes of Hugging Face's BertModel, bert-large-uncased, with its pooler, without a head.

    391 parameters, 335,141,888 elements.
    """
    hidden, inner = 1024, 4096
    yield from ((30522, hidden), (512, hidden), (2, hidden))
    yield from _weight_and_bias(hidden)
    for _ in range(24):
        for _matrix in ("query", "key", "value", "attention output"):
            yield from ((hidden, hidden), (hidden,))
        yield from _weight_and_bias(hidden)
        yield from ((inner, hidden), (inner,))
        yield from ((hidden, inner), (hidden,))
        yield from _weight_and_bias(hidden)
    yield from ((hidden, hidden), (hidden,))


def gpt2_medium() -> Iterator[Shape]:
    """Yield the shapes of Hugging Face's GPT2LMHeadModel, gpt2-medium, its head tied to the token embedding.

    292 parameters, 354,823,168 elements. Its linear layers store the transposed matrix.
    """
    hidden = 1024
    yield from ((50257, hidden), (1024, hidden))
    for _ in range(24):
        yield from _weight_and_bias(hidden)
        yield from ((hidden, 3 * hidden), (3 * hidden,))
        yield from ((hidden, hidden), (hidden,))
        yield from _weight_and_bias(hidden)
        yield from ((hidden, 4 * hidden), (4 * hidden,))
        yield from ((4 * hidden, hidden), (hidden,))
    yield from _weight_and_bias(hidden)


def _weight_and_bias(num_features: int) -> Iterator[Shape]:
    """Yield the shapes of a normalisation layer's two vectors."""
    yield (num_features,)
    yield (num_features,)


MODELS = {"resnet50": resnet50, "bert-large": bert_large, "gpt2-medium": gpt2_medium}


def buckets(model: str, dtype: torch.dtype = torch.float32) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model of MODELS, as DDP has them from its second iteration on.

    DDP rebuilds its buckets in the order in which gradients become ready. This function takes the reverse of
    the registration order for it. A bucket closes once it has reached its cap, so one large parameter makes a
    large bucket.
    """
    shapes = list(reversed(list(MODELS[model]())))
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    assignment, _ = dist._compute_bucket_assignment_by_size(
        tensors, [FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES], [False] * len(tensors)
    )
    return [[shapes[index] for index in indices] for indices in assignment]


def one_bucket(model: str, dtype: torch.dtype = torch.float32) -> list[Shape]:
    """Return the model's bucket with the most parameters, which is the hardest to flatten."""
    return max(buckets(model, dtype), key=len)


def num_elements(shapes: list[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)
