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
from tests.tolerances import QUANTIZED_IDENTITY

BITS = pytest.mark.parametrize("bits", [4, 8])


def take_step(state, rank, step, poison=0.0):
    """Average one bucket on the rank's device; return its input and output, and the bucket."""
    gradient = random_gradient(SHAPES, rank, step)
    gradient[100] += poison
    bucket = Bucket(gradient.clone().to(device_of_rank()), SHAPES)
    return gradient, quantization_hook(state, bucket).wait().cpu(), bucket


def steps_on_kernels(rank, bits):
    """Take three steps; return their inputs and outputs, the last error, and whether kernels ran."""
    state, results = QuantizationState(bits=bits, block_size=16), []
    for step in range(3):
        gradient, output, bucket = take_step(state, rank, step)
        results.append((gradient, output))
        (known,) = state._states._buckets
        del bucket  # the state then takes the next buckets for a new model's
    error = error_in(state).cpu()
    return results, error, isinstance(known.compressor._sum.operations[0], Stage)


@BITS
def test_steps_on_kernels(run_ranks, bits):
    ranks = run_ranks(steps_on_kernels, 2, bits, interpret=True)
    assert [is_on_kernels for _, _, is_on_kernels in ranks] == [True, True]
    inputs = torch.stack([torch.stack([step[0] for step in steps]) for steps, _, _ in ranks]).double().mean(0)
    outputs = torch.stack([step[1] for step in ranks[0][0]]).double()
    for steps, _, _ in ranks:
        assert torch.equal(torch.stack([step[1] for step in steps]).double(), outputs)
    assert relative(outputs[0], inputs[0]) < LOSS[bits]
    error = torch.stack([error for _, error, _ in ranks]).double().mean(0)
    assert relative(outputs.sum(0) + error, inputs.sum(0)) < QUANTIZED_IDENTITY[torch.float32]


def broken_off(rank):
    """Return the last outputs of a whole run, and of runs resumed after two steps from either file."""
    whole, first, second = (QuantizationState(block_size=16) for _ in range(3))
    expected = [take_step(whole, rank, step)[1] for step in range(4)]
    for step in range(2):
        take_step(first, rank, step)
    # On the CPU, as the next run may have another GPU.
    second.load_state_dict(reload(first.state_dict(), map_location="cpu"))
    resumed = (second, reload(first))
    return expected[2:], [[take_step(each, rank, step)[1] for step in range(2, 4)] for each in resumed]


def test_a_resumed_run_has_the_same_bits(run_ranks):
    for expected, resumed in run_ranks(broken_off, 2, interpret=True):
        assert equal(resumed, [expected, expected])


def one_bad_step(rank):
    state = QuantizationState(block_size=16)
    return [take_step(state, rank, step, math.nan if step == rank == 1 else 0.0)[1] for step in range(4)]


def test_one_step_that_is_not_finite(run_ranks):
    first, second = run_ranks(one_bad_step, 2, interpret=True)
    for outputs in (first, second):
        assert [bool(output.isfinite().all()) for output in outputs] == [True, False, True, True]
    assert equal(first[2:], second[2:])
