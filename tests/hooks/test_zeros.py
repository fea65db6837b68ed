"""Elements that are zero on all ranks stay zero: padding rows, unseen rows, pruned or masked elements."""

import math
from functools import partial

import pytest
import torch

from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradcomp.testing import run_ranks
from tests.depth import everyday, mixed
from tests.hooks.powersgd_oracle import Bucket, random_gradient

SHAPES = ((24, 40), (9,), (7, 30), (3, 11, 5))
NUMEL = sum(math.prod(shape) for shape in SHAPES)
STEPS = 5


def zeros_of(kind):
    """Return a mask [numel] of the elements that are zero on every rank."""
    masked = torch.rand(NUMEL, generator=torch.Generator().manual_seed(9)) < 0.4
    rows = torch.zeros(NUMEL, dtype=torch.bool)
    rows[:40] = True  # a padding row
    rows[400:720] = True  # rows of words that no rank has seen: whole blocks, between blocks with values
    rows[-55:] = True
    if kind == "all but one in a block":
        masked = torch.arange(NUMEL) % 61 != 5
    return rows if kind == "rows" else masked


def gradient_of(kind, rank, step):
    gradient = random_gradient(SHAPES, rank, step)
    if kind == "negative zeros":
        gradient *= -1.0
    if kind == "all but one in a block":
        gradient *= 1e-42
    zeros = zeros_of(kind)
    gradient[zeros] = torch.copysign(torch.zeros(()), gradient[zeros])
    return gradient


def steps_of(rank, group, kind, make_state, hook):
    """Return every step's output."""
    state, bucket, outputs = make_state(group), Bucket(torch.zeros(0), SHAPES), []
    for step in range(STEPS):
        bucket.set_buffer(gradient_of(kind, rank, step))
        outputs.append(hook(state, bucket).wait().clone())
    return outputs


HOOKS = {
    "4 bits": (partial(QuantizationState, bits=4, block_size=16), quantization_hook),
    "8 bits": (partial(QuantizationState, bits=8, block_size=16), quantization_hook),
    "4 bits in odd blocks": (partial(QuantizationState, bits=4, block_size=26), quantization_hook),
    "8 bits in odd blocks": (partial(QuantizationState, bits=8, block_size=26), quantization_hook),
    "4 bits without feedback": (
        partial(QuantizationState, bits=4, block_size=16, use_error_feedback=False),
        quantization_hook,
    ),
    "per tensor": (lambda group: group, quantization_pertensor_hook),
    "per channel": (lambda group: group, partial(quantization_perchannel_hook, bucket_size=22)),
}
KINDS = ("rows", "masked", "negative zeros", "all but one in a block")


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(("name", "kind"), mixed(list(HOOKS), KINDS))
def test_zeros_stay_zeros(name, kind):
    for world_size in (1, 3):
        outputs = run_ranks(steps_of, world_size, kind, *HOOKS[name])
        for of_rank in outputs:
            assert not any(output[zeros_of(kind)].any() for output in of_rank)
            assert all(output.isfinite().all() for output in of_rank)
        values = ~zeros_of(kind)
        if kind != "all but one in a block":  # the smallest numbers have scales of zero
            assert all(output[values].any() for output in outputs[0])


@pytest.mark.parametrize("name", everyday(["4 bits"], ["4 bits", "8 bits"]))
def test_zeros_stay_zeros_on_the_kernels(name):
    """The kernels run on a GPU, or in Triton's interpreter."""
    for output in run_ranks(steps_of, 2, "masked", *HOOKS[name])[0]:
        assert not output[zeros_of("masked")].any()


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("options", [{"factor_dtype": torch.int8}, {"start_bits": 4}], ids=str)
def test_powersgd_sends_zeros_exactly_where_it_sends_exactly(options):
    """Zeros stay in a quantized start, and in tensors that PowerSGD doesn't compress; not in a matrix."""
    start = STEPS if "start_bits" in options else 2
    make_state = partial(
        PowerSGDState,
        matrix_approximation_rank=1,
        start_powerSGD_iter=start,
        min_compression_rate=3,
        **options,
    )
    exact = torch.ones(NUMEL, dtype=torch.bool)
    if start < STEPS:  # only the vector is sent exactly
        exact[:960] = exact[969:] = False
    for output in run_ranks(steps_of, 2, "masked", make_state, powerSGD_hook)[0]:
        assert not output[zeros_of("masked") & exact].any()
        assert output[~zeros_of("masked") & exact].any()
