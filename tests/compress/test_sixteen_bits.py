"""bits=16: every element in 16 bits on the wire, sums in fp32."""

import pytest
import torch

from gradcomp import testing
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.testing import check_hook, claims_of
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient

SHAPES = [(40, 30), (17,), (8, 3, 5), (1,), (3, 2)]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


def averaged(rank, group, dtype, options):
    state = QuantizationState(group, bits=16, **options)
    gradient = random_gradient(SHAPES, rank, 0, dtype)
    return gradient, quantization_hook(state, Bucket(gradient.clone(), SHAPES)).wait()


@pytest.mark.usefixtures("plain_torch")
@DTYPES
@pytest.mark.parametrize("wire", [None, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_sum_is_in_fp32_and_rounded_once(dtype, wire, world_size):
    """With one exchange, as between two ranks, the mean itself isn't rounded to 16 bits."""
    results = testing.run_ranks(averaged, world_size, dtype, {"uncompressed_dtype": wire})
    wide, wire = torch.promote_types(dtype, torch.float32), wire or torch.bfloat16
    total = sum(gradient.to(wire).to(wide) for gradient, _ in results)
    for _, output in results:
        mean = total / world_size
        assert torch.equal(output, (mean if world_size == 2 else mean.to(wire)).to(dtype))


def on_kernels(rank, options):
    return averaged(rank, None, torch.float32, options)


@pytest.mark.parametrize("options", [{}, {"ranks_per_node": 2}], ids=["flat", "hierarchical"])
def test_kernels_have_the_bits_of_plain_torch(run_ranks, options):
    plain, kernels = (run_ranks(on_kernels, 4, options, interpret=interpret) for interpret in (False, True))
    assert torch.equal(plain[0][1], kernels[0][1])


@pytest.mark.usefixtures("plain_torch")
def test_every_property_of_the_kit():
    def make_state(group):
        return QuantizationState(group, bits=16)

    assert claims_of(quantization_hook, make_state).precision == torch.bfloat16
    check_hook(quantization_hook, make_state, max_examples=everyday(2, 4)).raise_if_failed()


def test_errors_are_not_kept():
    assert not QuantizationState(bits=16).options.error_feedback
    assert QuantizationState(bits=8).options.error_feedback
    with pytest.raises(ValueError, match="error_feedback is on, but bits is 16"):
        QuantizationState(bits=16, use_error_feedback=True)
    state = QuantizationState(bits=16)
    state.bits = 4
    assert state.use_error_feedback
    with pytest.raises(ValueError, match=r"16 bits keep no errors\. Make another"):
        state.bits = 16
