"""Three real models as lists of shapes, in registration order, and their DDP buckets.

The shapes are written out here: nothing is downloaded or installed.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from gradcomp.plan import Shape, buckets_of


def num_elements(shapes: Iterable[Shape]) -> int:
    return sum(map(math.prod, shapes))


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of torchvision's resnet50: 161 parameters, 25,557,032 elements."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    channels = 64
    for num_blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(num_blocks):
            convolutions = [(width, channels, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1))  # the downsampling shortcut
            for channels_out, channels_in, size in convolutions:
                # The convolution, and its batch norm's weight and bias.
                yield from ((channels_out, channels_in, size, size), (channels_out,), (channels_out,))
            channels = 4 * width
    yield from ((1000, 2048), (1000,))


def bert_large() -> Iterator[Shape]:
    """Yield the shapes of Hugging Face's BertModel, bert-large-uncased, with its pooler, without a head.

    391 parameters, 335,141,888 elements.
    """
    hidden, inner = 1024, 4096
    projection, norm = ((hidden, hidden), (hidden,)), ((hidden,), (hidden,))
    yield from ((30522, hidden), (512, hidden), (2, hidden), *norm)
    for _ in range(24):
        yield from (*projection * 4, *norm)  # query, key, value and the attention's output
        yield from ((inner, hidden), (inner,), (hidden, inner), (hidden,), *norm)
    yield from projection


def gpt2_medium() -> Iterator[Shape]:
    """Yield the shapes of Hugging Face's GPT2LMHeadModel, gpt2-medium, its head tied to the embedding.

    292 parameters, 354,823,168 elements. Its linear layers store the transposed matrix.
    """
    hidden = 1024
    norm = ((hidden,), (hidden,))
    yield from ((50257, hidden), (1024, hidden))
    for _ in range(24):
        yield from (*norm, (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,))
        yield from (*norm, (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,))
    yield from norm


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "bert-large": bert_large,
    "gpt2-medium": gpt2_medium,
}


def buckets(model: str, dtype: torch.dtype = torch.float32) -> list[list[Shape]]:
    """Return the shapes of each bucket of a model, as DDP has them from its second iteration on."""
    return buckets_of(list(MODELS[model]()), dtype.itemsize)


def one_bucket(model: str, dtype: torch.dtype = torch.float32) -> list[Shape]:
    """Return the model's bucket with the most parameters, which is the hardest to flatten."""
    return max(buckets(model, dtype), key=len)
