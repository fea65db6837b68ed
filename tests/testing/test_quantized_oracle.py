"""The oracle of the quantized all-reduce agrees with arithmetic by hand, and with the hook step by step."""

import pytest
import torch

from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
)
from gradcomp.testing.oracle import QuantizedOracle, mean, normal_levels, quantized, split
from gradcomp.testing.ranks import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.tolerances import QUANTIZED_LOSS, QUANTIZED_STEP, UNLIKE_BLOCKS

# 84 blocks of 16: no rank of 2 or 3 has a block of zeros. Beside one, plain torch rounds scales twice.
SHAPES = ((38, 32), (17,), (8, 3, 5), (3, 2), (16,))
BITS = pytest.mark.parametrize("bits", [4, 8])
STEPS = 4


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_eight_bits_by_hand():
    """Largest value 127: scale 1. Largest value 254: scale 2. Codes are rounded to even; inf makes NaN."""
    blocks = torch.tensor([[127, 0.4, -3.5, 2.6], [-254, 1, 3.2, 0], [torch.inf, 1, 2, 3], [0, 0, 0, 0]])
    result = quantized(blocks.double(), 8)
    assert result[:2].tolist() == [[127, 0, -4, 3], [-254, 0, 4, 0]]
    assert result[2].isnan().all()
    assert not result[3].any()


def test_four_bits_by_hand():
    """Max (1960) gives the levels for 2 and 4; a block of 3 and -3 is as near as bf16 allows."""
    assert normal_levels(2) == pytest.approx([-((2 / torch.pi) ** 0.5), (2 / torch.pi) ** 0.5])
    assert normal_levels(4)[2:] == pytest.approx([0.4528, 1.5104], abs=1e-4)
    assert normal_levels()[7:10] == pytest.approx([0.0, 0.2739, 0.5548], abs=1e-4)
    assert normal_levels()[7] == 0.0
    signs = torch.tensor([[3.0, -3, -3, 3]]).double()
    assert torch.allclose(quantized(signs, 4), signs, rtol=2**-8)
    assert not quantized(torch.zeros(1, 4).double(), 4).any()


@BITS
def test_error_feedback_loses_nothing(bits):
    """Σ outputs + Σ errors / ranks = Σ mean gradients with error feedback, and only then."""
    for error_feedback in (True, False):
        oracle = QuantizedOracle(SHAPES, bits, 16, error_feedback=error_feedback)
        inputs = outputs = 0.0
        for step in range(4):
            gradients = [split(random_gradient(SHAPES, rank, step), SHAPES) for rank in range(3)]
            inputs, outputs = inputs + flat(mean(gradients)), outputs + flat(oracle.step(gradients))
        owed = torch.stack([flat(of_rank) for of_rank in oracle.errors]).sum(0) + flat(oracle.owner_errors)
        assert torch.allclose(outputs + owed / 3, inputs, rtol=0, atol=1e-14) == error_feedback


def test_a_tensor_that_every_rank_skips_keeps_what_is_owed():
    oracle = QuantizedOracle([(4, 8)], 4, 16)
    oracle.step([split(random_gradient([(4, 8)], rank, 0), [(4, 8)]) for rank in range(2)])
    (owed,) = oracle.owner_errors
    oracle.errors = None
    (average,) = oracle.step([[torch.zeros(4, 8)]] * 2)
    assert not average.any()
    assert torch.equal(oracle.owner_errors[0], owed)
    # If two ranks' gradients cancel, the tensor isn't skipped.
    ones = torch.ones(4, 8)
    oracle.step([[ones], [-ones]])
    assert not torch.equal(oracle.owner_errors[0], owed)


def steps_of_hook(rank, group, bits, dtype):
    """Return for every step (gradient, output, the hook's error and its shard_error before the step)."""
    state, history = QuantizationState(group, bits, 16), []
    bucket = Bucket(torch.zeros(0, dtype=dtype), SHAPES)
    for step in range(STEPS):
        gradient = random_gradient(SHAPES, rank, step, dtype)
        saved = state.state_dict()["buckets"].get(0, {})
        bucket.set_buffer(gradient.clone())
        output = quantization_hook(state, bucket).wait()
        history.append((gradient, output, saved.get("error"), saved.get("shard_error")))
    return history


def continue_from(oracle, errors, shard_errors):
    """Load the hook's errors into the oracle. A rank's error includes the owner's error of its own shard."""
    split_up = [split(flat.double(), SHAPES) for flat in (*errors, *shard_errors)]
    own, owned = split_up[: len(errors)], split_up[len(errors) :]
    oracle.errors = [[e - o for e, o in zip(*pair, strict=True)] for pair in zip(own, owned, strict=True)]
    oracle.owner_errors = [sum(of_ranks) for of_ranks in zip(*owned, strict=True)]


@pytest.mark.usefixtures("plain_torch")
@BITS
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_hook_step_by_step(bits, world_size, dtype):
    """From the hook's errors, a step's outputs are equal, except in blocks with a value between levels."""
    runs = run_ranks(steps_of_hook, world_size, bits, dtype)
    oracle = QuantizedOracle(SHAPES, bits, 16)
    unlike = 0.0
    for of_ranks in zip(*runs, strict=True):
        gradients, outputs, errors, shard_errors = zip(*of_ranks, strict=True)
        if errors[0] is not None:
            continue_from(oracle, errors, shard_errors)
        owed = [flat(oracle.owner_errors)] + [flat(each) for each in oracle.errors or ()]
        exact = (torch.stack(gradients).double().sum(0) + sum(owed)) / world_size
        expected = flat(oracle.step([split(gradient, SHAPES) for gradient in gradients]))
        got = outputs[0].double()
        unlike += float(((got - expected).abs() > QUANTIZED_STEP * exact.abs().max()).double().mean()) / STEPS
        assert (got - exact).norm() <= QUANTIZED_LOSS * (expected - exact).norm()
        is_exact = torch.tensor([False] * 1216 + [True] * 17 + [False] * 120 + [True] * 22)
        assert (got - exact)[is_exact].abs().max() <= QUANTIZED_STEP
    assert unlike <= UNLIKE_BLOCKS


@pytest.mark.usefixtures("plain_torch")
@BITS
def test_the_hook_left_to_itself(bits):
    """After several steps from its own errors, the hook's error is at most a tenth above the oracle's."""
    runs = run_ranks(steps_of_hook, 3, bits, torch.float32)
    oracle = QuantizedOracle(SHAPES, bits, 16)
    inputs = outputs = expected = 0.0
    for of_ranks in zip(*runs, strict=True):
        gradients = [split(gradient, SHAPES) for gradient, *_ in of_ranks]
        inputs = inputs + flat(mean(gradients))
        outputs, expected = outputs + of_ranks[0][1].double(), expected + flat(oracle.step(gradients))
    # Only the last step's roundings remain. They are in other elements, so norms are close, not equal.
    assert (outputs - inputs).norm() <= 1.1 * (expected - inputs).norm()


def channels(rank, group):
    gradient = random_gradient(SHAPES, rank, 0)
    return gradient, quantization_perchannel_hook(group, Bucket(gradient.clone(), SHAPES), 16).wait()


@pytest.mark.usefixtures("plain_torch")
def test_the_hook_without_state():
    runs = run_ranks(channels, 2)  # 43 blocks each
    numel = len(runs[0][0])
    oracle = QuantizedOracle([(1, numel)], 8, 16, error_feedback=False)
    (expected,) = oracle.step([[gradient.view(1, numel)] for gradient, _ in runs])
    assert not oracle.owner_errors[0].any()
    exact = torch.stack([gradient for gradient, _ in runs]).double().mean(0)
    got = runs[0][1].double()
    assert (got - exact).norm() <= QUANTIZED_LOSS * (expected[0] - exact).norm()
    assert ((got - expected[0]).abs() > QUANTIZED_STEP).double().mean() <= UNLIKE_BLOCKS
