"""Models, four real ones, two small ones or a user's: their parameters, computation and DDP buckets.

Shapes are written out here, in registration order: nothing is downloaded or installed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

Shape = tuple[int, ...]

# DDP's defaults: torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25), and 1 MiB for the first bucket.
FIRST_BUCKET_BYTES = 2**20
BUCKET_CAP_BYTES = 25 * 2**20


class Parameter(NamedTuple):
    """A parameter's shape, and its multiply-accumulates in the forward pass of one sample.

    A sample is an image or a token. num_macs is zero for parameters outside matrix products.
    """

    shape: Shape
    num_macs: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model in training.

    parameters: in registration order.
    sample: the name of a sample, image or token; empty if num_macs is unknown.
    samples_per_item: samples in one item of a batch.
    batch: items in a rank's batch, by default.
    utilization: the part of a GPU's peak rate that such models reach.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sample: str = ""
    samples_per_item: int = 1
    batch: int = 1
    utilization: float = 0.4

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def shapes(self) -> list[Shape]:
        return [parameter.shape for parameter in self.parameters]

    def forward_flops(self, batch: int) -> float:
        """Return the operations of a rank's forward pass. Backward takes twice as many.

        Attention's products of activations, a few percent, aren't counted.
        """
        macs = sum(parameter.num_macs for parameter in self.parameters)
        return 2.0 * macs * self.samples_per_item * batch


def resnet50() -> Iterator[Parameter]:
    """Yield the parameters of torchvision's resnet50 on images of 224×224: 161, 25,557,032 elements."""
    yield _convolution(64, 3, 7, 112)
    yield from _weight_and_bias(64)
    channels, side = 64, 56
    for stage, (num_blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(num_blocks):
            is_first = block == 0
            before = side
            if is_first and stage:  # the block's 3×3 convolution halves the side
                side //= 2
            yield _convolution(width, channels, 1, before)
            yield from _weight_and_bias(width)
            yield _convolution(width, width, 3, side)
            yield from _weight_and_bias(width)
            yield _convolution(4 * width, width, 1, side)
            yield from _weight_and_bias(4 * width)
            if is_first:  # the downsampling shortcut
                yield _convolution(4 * width, channels, 1, side)
                yield from _weight_and_bias(4 * width)
            channels = 4 * width
    yield _matrix(1000, 2048)
    yield Parameter((1000,))


def bert_large() -> Iterator[Parameter]:
    """Yield the parameters of Hugging Face's BertModel, bert-large-uncased, with its pooler, without a head.

    391 parameters, 335,141,888 elements.
    """
    hidden, inner = 1024, 4096
    yield from map(Parameter, ((30522, hidden), (512, hidden), (2, hidden)))
    yield from _weight_and_bias(hidden)
    for _ in range(24):
        for _projection in ("query", "key", "value", "attention output"):
            yield from (_matrix(hidden, hidden), Parameter((hidden,)))
        yield from _weight_and_bias(hidden)
        yield from (_matrix(inner, hidden), Parameter((inner,)))
        yield from (_matrix(hidden, inner), Parameter((hidden,)))
        yield from _weight_and_bias(hidden)
    yield from (Parameter((hidden, hidden)), Parameter((hidden,)))  # the pooler sees one token of a sequence


def gpt2_medium() -> Iterator[Parameter]:
    """Yield the parameters of Hugging Face's GPT2LMHeadModel, gpt2-medium, its head tied to the embedding.

    292 parameters, 354,823,168 elements. Its linear layers store the transposed matrix.
    """
    hidden, vocabulary = 1024, 50257
    yield from map(Parameter, ((vocabulary, hidden), (1024, hidden)))
    for _ in range(24):
        yield from _weight_and_bias(hidden)
        yield from (_matrix(hidden, 3 * hidden), Parameter((3 * hidden,)))
        yield from (_matrix(hidden, hidden), Parameter((hidden,)))
        yield from _weight_and_bias(hidden)
        yield from (_matrix(hidden, 4 * hidden), Parameter((4 * hidden,)))
        yield from (_matrix(4 * hidden, hidden), Parameter((hidden,)))
    # Backward begins with the head's products, though the gradient of its matrix is complete at the end only.
    yield Parameter((hidden,), vocabulary * hidden)
    yield Parameter((hidden,))


def llama_7b() -> Iterator[Parameter]:
    """Yield the parameters of the 7 B LLaMA (Touvron et al., "LLaMA", 2023), its head not tied.

    291 parameters, 6,738,415,616 elements.
    """
    hidden, inner, vocabulary = 4096, 11008, 32000
    yield Parameter((vocabulary, hidden))
    for _ in range(32):
        for _projection in ("query", "key", "value", "attention output"):
            yield _matrix(hidden, hidden)
        yield from (_matrix(inner, hidden), _matrix(inner, hidden), _matrix(hidden, inner))
        yield from (Parameter((hidden,)), Parameter((hidden,)))
    yield Parameter((hidden,))
    yield _matrix(vocabulary, hidden)


def gpt() -> Iterator[Parameter]:
    """Yield the parameters of the small GPT that bench trains: 52, 3,290,624 elements."""
    hidden, vocabulary = 256, 256
    yield Parameter((vocabulary, hidden))
    for _ in range(4):
        yield from (*_weight_and_bias(hidden), *_weight_and_bias(hidden))
        for rows, cols in ((3, 1), (1, 1), (4, 1), (1, 4)):
            yield from (_matrix(rows * hidden, cols * hidden), Parameter((rows * hidden,)))
    yield from _weight_and_bias(hidden)
    yield _matrix(vocabulary, hidden)


def mlp() -> Iterator[Parameter]:
    """Yield the parameters of the perceptron that bench trains: 6, 1,863,690 elements."""
    for rows, cols in ((1024, 784), (1024, 1024), (10, 1024)):
        yield from (_matrix(rows, cols), Parameter((rows,)))


def _convolution(channels_out: int, channels_in: int, size: int, side: int) -> Parameter:
    """Return the weight of a convolution with an output of side × side positions."""
    shape = (channels_out, channels_in, size, size)
    return Parameter(shape, math.prod(shape) * side**2)


def _matrix(rows: int, cols: int) -> Parameter:
    return Parameter((rows, cols), rows * cols)


def _weight_and_bias(num_features: int) -> Iterator[Parameter]:
    """Yield a normalization layer's two vectors."""
    yield Parameter((num_features,))
    yield Parameter((num_features,))


# By name: parameters, sample, samples_per_item, batch, utilization.
_BUILT_IN: dict[str, tuple[Callable[[], Iterator[Parameter]], str, int, int, float]] = {
    "resnet50": (resnet50, "image", 1, 64, 0.2),
    "bert-large": (bert_large, "token", 512, 8, 0.4),
    "gpt2-medium": (gpt2_medium, "token", 1024, 4, 0.4),
    "llama-7b": (llama_7b, "token", 2048, 2, 0.4),
    "gpt": (gpt, "token", 64, 4, 0.4),
    "mlp": (mlp, "image", 1, 64, 0.4),
}
BUILT_IN_MODELS = tuple(_BUILT_IN)


def built_in_model(name: str) -> Model:
    """Return the model of BUILT_IN_MODELS with this name."""
    parameters, sample, samples_per_item, batch, utilization = _BUILT_IN[name]
    return Model(name, tuple(parameters()), sample, samples_per_item, batch, utilization)


def num_elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients.

    ready_at: the part of backward's time, 0 to 1, after which the bucket is ready.
    """

    shapes: tuple[Shape, ...]
    ready_at: float

    @property
    def numel(self) -> int:
        return num_elements(self.shapes)


def ddp_assignment(sizes_bytes: Iterable[int], cap_bytes: float = BUCKET_CAP_BYTES) -> list[list[int]]:
    """Return the indices of each bucket's tensors, as DDP assigns tensors of one dtype.

    sizes_bytes: in the order of assignment.

    A bucket closes once it reaches its cap, so one large tensor makes a large bucket.
    """
    assignment: list[list[int]] = []
    indices: list[int] = []
    filled, cap = 0, min(float(FIRST_BUCKET_BYTES), cap_bytes)
    for index, size in enumerate(sizes_bytes):
        indices.append(index)
        filled += size
        if filled >= cap:
            assignment.append(indices)
            indices, filled, cap = [], 0, cap_bytes
    return [*assignment, indices] if indices else assignment


def buckets_of(
    parameters: Sequence[Parameter] | Sequence[Shape],
    itemsize: int = 4,
    cap_bytes: float = BUCKET_CAP_BYTES,
) -> list[Bucket]:
    """Return the buckets of a model, as DDP has them from its second iteration on.

    DDP rebuilds its buckets in the order in which gradients become ready. This function assumes the reversed
    registration order, and that a parameter's part of backward's time is in proportion to its num_macs. If
    num_macs is zero everywhere, as for shapes, the parts are in proportion to elements.
    """
    given = [each if isinstance(each, Parameter) else Parameter(tuple(each)) for each in parameters]
    given.reverse()
    work = [each.num_macs for each in given]
    if not any(work):
        work = [each.numel for each in given]
    total = max(sum(work), 1)
    buckets, done = [], 0
    for indices in ddp_assignment([each.numel * itemsize for each in given], cap_bytes):
        done += sum(work[index] for index in indices)
        buckets.append(Bucket(tuple(given[index].shape for index in indices), done / total))
    return buckets


def load_model(name: str) -> Model:
    """Return the model of this name.

    name: one of BUILT_IN_MODELS, or module:callable. The callable takes no argument and returns an nn.Module,
        a tuple that begins with a module, or a list of shapes.

    The callable runs on the meta device, where parameters need no memory. If that fails, it runs on the CPU.
    Raises ValueError for an unknown name, and for a callable that fails or returns anything else.
    """
    if name in BUILT_IN_MODELS:
        return built_in_model(name)
    function = load_callable(name)
    try:
        with torch.device("meta"):
            made = function()
    except Exception:
        made = called(function, name)
    return Model(name, tuple(Parameter(shape) for shape in shapes_of(made, name)))


def load_callable(name: str) -> Callable[[], Any]:
    """Return the callable of `module:callable`. Raises ValueError if there is none."""
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(
            f"there is no model {name!r}; known are {', '.join(BUILT_IN_MODELS)}, and module:callable for a "
            "function of yours"
        )
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"model {name!r}: module {module!r} can't be imported: {error}") from error
    except Exception as error:
        raise ValueError(f"model {name!r}: module {module!r} fails: {_in_words(error)}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        what = "not callable" if hasattr(found, attribute) else "not there"
        raise ValueError(f"model {name!r}: {attribute!r} of module {module!r} is {what}")
    checked: Callable[[], Any] = function
    return checked


def called(function: Callable[[], Any], name: str) -> Any:
    """Call the function and return its result. Raises ValueError if it raises."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"model {name!r}: calling it without arguments fails: {_in_words(error)}") from error


def shapes_of(made: Any, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters with gradients.

    made: the result of load_model's callable. Raises ValueError for other objects.
    """
    module = made[0] if isinstance(made, tuple) and made and isinstance(made[0], nn.Module) else made
    if isinstance(module, nn.Module):
        shapes = [tuple(each.shape) for each in module.parameters() if each.requires_grad]
    elif _are_shapes(made):
        shapes = [tuple(shape) for shape in made]
    else:
        raise ValueError(
            f"model {name!r} returned {type(made).__name__}; it must return an nn.Module, a tuple that "
            "begins with one, or a list of shapes"
        )
    if not shapes:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    return shapes


def _are_shapes(made: Any) -> bool:
    return isinstance(made, Sequence) and all(
        isinstance(shape, Sequence)
        and not isinstance(shape, str)
        and all(type(length) is int and length > 0 for length in shape)
        for shape in made
    )


def _in_words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
