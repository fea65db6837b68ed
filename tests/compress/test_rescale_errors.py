"""Errors that follow a GradScaler's scale: averages of scaled gradients are the unscaled ones, scaled."""

import pytest
import torch

from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient

SHAPES = [(24, 18), (7,), (5, 3, 4)]
SCALES = [2.0**16, 2.0**16, 2.0**15, 2.0**17, 2.0**17, 2.0**3]  # powers of two: scaling rounds nothing


def powersgd(**options):
    return PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1, **options)


KINDS = {
    "int4": (lambda: QuantizationState(bits=4, block_size=16), quantization_hook),
    "int8": (lambda: QuantizationState(bits=8, block_size=16), quantization_hook),
    "without errors": (lambda: QuantizationState(use_error_feedback=False, block_size=16), quantization_hook),
    "PowerSGD": (powersgd, powerSGD_hook),
    "batched": (powersgd, batched_powerSGD_hook),
    "int8 factors": (lambda: powersgd(factor_dtype=torch.int8, start_bits=8), powerSGD_hook),
    "PowerSGD without error feedback": (lambda: powersgd(use_error_feedback=False), powerSGD_hook),
}


def averages(rank, name, scales, follow="rescale", resume_at=None):
    """Average a bucket in each step, multiplied by the step's scale; return averages divided by the scale."""
    make, hook = KINDS[name]
    state, found = make(), []
    for step, scale in enumerate(scales):
        if step == resume_at:
            saved, state = state.state_dict(), make()
            state.load_state_dict(saved)
        if follow == "assign":
            state.gradient_scale = scale
        elif step and follow == "rescale":
            state.rescale_errors(scale / scales[step - 1])
        gradient = random_gradient(SHAPES, rank, step) * scale
        found.append(hook(state, Bucket(gradient, SHAPES)).wait() / scale)
    return torch.stack(found)


def runs(rank, name, scales):
    return (
        averages(rank, name, [1.0] * len(scales)),
        averages(rank, name, scales),
        averages(rank, name, scales, "assign", resume_at=len(scales) - 2),
        averages(rank, name, scales, follow=None),
    )


# On kernels, test each kind of plan once. The state does the rest, without kernels.
@pytest.mark.parametrize(
    ("name", "interpret"),
    [
        *((name, False) for name in KINDS),
        *((name, True) for name in everyday(["PowerSGD"], ["int4", "PowerSGD", "int8 factors"])),
    ],
)
def test_the_scale_makes_no_difference_to_averages(run_ranks, name, interpret):
    scales = SCALES[-4:] if interpret else SCALES  # the interpreter is slow
    ranks = run_ranks(runs, 2, name, scales, interpret=interpret)
    for without_scale, followed, resumed, not_followed in ranks:
        for scaled in (followed, resumed):
            if interpret:
                # The kernels subtract P Qᵀ in the next step. Reading an error before rounds it once more.
                torch.testing.assert_close(scaled, without_scale, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(scaled, without_scale)
        assert ((not_followed - without_scale).abs().max() > 0.1) == ("without" not in name)


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan"), None, "2"])
def test_a_factor_that_is_none(factor):
    with pytest.raises(
        ValueError, match=r"factor of rescale_errors, .* is .*, but must be finite and positive"
    ):
        QuantizationState().rescale_errors(factor)
    with pytest.raises(ValueError, match=r"gradient_scale is .*, but must be finite and positive"):
        QuantizationState().gradient_scale = factor
