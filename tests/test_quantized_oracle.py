"""The oracle of the quantized all-reduce agrees with arithmetic by hand, and with the hook step by step."""

import pytest
import torch

from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_perchannel_hook,
)
from gradcomp.testing.ranks import run_ranks
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.kept import error_in
from tests.oracle import QuantizedOracle, quantized, split
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
    """Largest value 7: scale 1. Largest value 1: scale 1 / 7, rounded up to bf16."""
    blocks = torch.tensor([[7, 0.4, -3.5, 2.6], [1, -1, 0, 0.5]]).double()
    above = (1 / 7) // 2**-10 * 2**-10 + 2**-10
    assert quantized(blocks, 4).tolist() == [[7, 0, -4, 3], [7 * above, -7 * above, 0, 3 * above]]


def test_an_owner_sends_itself_nothing():
    """Of one rank only the mean is rounded. Of two, an owner's error is what the mean has lost."""
    gradients = [[torch.randn(4, 8)] for _ in range(2)]
    (average,) = QuantizedOracle([(4, 8)], 4, 16).step(gradients[:1])
    assert torch.equal(average.view(2, 16), quantized(gradients[0][0].double().view(2, 16), 4))
    oracle = QuantizedOracle([(4, 8)], 4, 16)
    (average,) = oracle.step(gradients)
    for own in (0, 1):
        sent = quantized(gradients[1 - own][0].double().view(2, 16), 4)[own]
        lost = gradients[own][0].view(2, 16)[own] + sent - 2 * average.view(2, 16)[own]
        assert torch.allclose(oracle.errors[own][0].view(2, 16)[own], lost, atol=1e-15)


def steps_of_hook(rank, group, bits, dtype):
    """Return for every step (gradient, output, the hook's error before the step)."""
    state, history = QuantizationState(group, bits, 16), []
    bucket = Bucket(torch.zeros(0, dtype=dtype), SHAPES)
    for step in range(STEPS):
        gradient = random_gradient(SHAPES, rank, step, dtype)
        before = error_in(state)
        bucket.set_buffer(gradient.clone())
        history.append((gradient, quantization_hook(state, bucket).wait(), before))
    return history


@pytest.mark.usefixtures("plain_torch")
@BITS
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_hook_step_by_step(bits, world_size, dtype):
    """From the hook's errors, a step's outputs are equal, except where rounding decides between two codes."""
    runs = run_ranks(steps_of_hook, world_size, bits, dtype)
    oracle = QuantizedOracle(SHAPES, bits, 16)
    unlike = 0.0
    for of_ranks in zip(*runs, strict=True):
        gradients, outputs, errors = zip(*of_ranks, strict=True)
        if errors[0] is not None:
            oracle.errors = [split(error.double(), SHAPES) for error in errors]
        owed = [flat(each) for each in oracle.errors or ()]
        exact = (torch.stack(gradients).double().sum(0) + sum(owed)) / world_size
        expected = flat(oracle.step([split(gradient, SHAPES) for gradient in gradients]))
        got = outputs[0].double()
        unlike += float(((got - expected).abs() > QUANTIZED_STEP * exact.abs().max()).double().mean()) / STEPS
        assert (got - exact).norm() <= QUANTIZED_LOSS * (expected - exact).norm()
        is_exact = torch.tensor([False] * 1216 + [True] * 17 + [False] * 120 + [True] * 22)
        assert (got - exact)[is_exact].abs().max() <= QUANTIZED_STEP
    assert unlike <= UNLIKE_BLOCKS


def channels(rank, group):
    gradient = random_gradient(SHAPES, rank, 0)
    return gradient, quantization_perchannel_hook(group, Bucket(gradient.clone(), SHAPES), 16).wait()


@pytest.mark.usefixtures("plain_torch")
def test_the_hook_without_state():
    runs = run_ranks(channels, 2)  # 43 blocks each
    numel = len(runs[0][0])
    oracle = QuantizedOracle([(1, numel)], 8, 16, error_feedback=False)
    (expected,) = oracle.step([[gradient.view(1, numel)] for gradient, _ in runs])
    assert not any(error.any() for (error,) in oracle.errors)
    exact = torch.stack([gradient for gradient, _ in runs]).double().mean(0)
    got = runs[0][1].double()
    assert (got - exact).norm() <= QUANTIZED_LOSS * (expected[0] - exact).norm()
    assert ((got - expected[0]).abs() > QUANTIZED_STEP).double().mean() <= UNLIKE_BLOCKS
