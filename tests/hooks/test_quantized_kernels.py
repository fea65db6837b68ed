"""Test the quantized all-reduce on the Triton kernels (on a GPU, or interpreted), with real processes."""

import math

import pytest
import torch

from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.kernels.launch import Stage
from tests.devices import device_of_rank
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import equal, reload
from tests.hooks.test_quantization_hook import LOSS, SHAPES
from tests.kept import error_in
from tests.ranks import of_all_ranks
from tests.tolerances import QUANTIZED_IDENTITY

BITS = pytest.mark.parametrize("bits", [4, 8])


def take_step(state, rank, step, poison=0.0):
    """Average one bucket on the rank's device; return its input and output, and the bucket."""
    gradient = random_gradient(SHAPES, rank, step)
    gradient[100] += poison
    bucket = Bucket(gradient.clone().to(device_of_rank()), SHAPES)
    return gradient, quantization_hook(state, bucket).wait().cpu(), bucket


@pytest.mark.ranks(2, interpret=True)
@BITS
def test_steps_on_kernels(rank, bits):
    """Take three steps."""
    state, results = QuantizationState(bits=bits, block_size=16), []
    for step in range(3):
        gradient, output, bucket = take_step(state, rank, step)
        results.append((gradient, output))
        (known,) = state._states._buckets
        del bucket  # the state then takes the next buckets for a new model's
    error = error_in(state).cpu()
    ranks = of_all_ranks((results, error, isinstance(known.compressor._sum.operations[0], Stage)))
    assert [is_on_kernels for _, _, is_on_kernels in ranks] == [True, True]
    inputs = torch.stack([torch.stack([step[0] for step in steps]) for steps, _, _ in ranks]).double().mean(0)
    outputs = torch.stack([step[1] for step in ranks[0][0]]).double()
    for steps, _, _ in ranks:
        assert torch.equal(torch.stack([step[1] for step in steps]).double(), outputs)
    assert relative(outputs[0], inputs[0]) < LOSS[bits]
    error = torch.stack([error for _, error, _ in ranks]).double().mean(0)
    assert relative(outputs.sum(0) + error, inputs.sum(0)) < QUANTIZED_IDENTITY[torch.float32]


@pytest.mark.ranks(2, interpret=True)
def test_a_resumed_run_has_the_same_bits(rank):
    whole, first, second = (QuantizationState(block_size=16) for _ in range(3))
    expected = [take_step(whole, rank, step)[1] for step in range(4)]
    for step in range(2):
        take_step(first, rank, step)
    # On the CPU, as the next run may have another GPU.
    second.load_state_dict(reload(first.state_dict(), map_location="cpu"))
    resumed = (second, reload(first))
    expected, resumed = (
        expected[2:],
        [[take_step(each, rank, step)[1] for step in range(2, 4)] for each in resumed],
    )
    assert equal(resumed, [expected, expected])


@pytest.mark.ranks(2, interpret=True)
def test_one_step_that_is_not_finite(rank):
    state = QuantizationState(block_size=16)
    first, second = of_all_ranks(
        [take_step(state, rank, step, math.nan if step == rank == 1 else 0.0)[1] for step in range(4)]
    )
    for outputs in (first, second):
        assert [bool(output.isfinite().all()) for output in outputs] == [True, False, True, True]
    assert equal(first[2:], second[2:])
