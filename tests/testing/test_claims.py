"""Claims are inferred from a hook's state and a probe; check_hook checks exactly these claims."""

from functools import partial

import pytest
import torch

from benchmarks.kit_verdicts import OURS, TORCHS
from gradcomp.hooks import default_hooks
from gradcomp.hooks import powerSGD_hook as powerSGD
from gradcomp.testing import Tolerance, check_hook, claims_of
from tests.testing import compressors
from tests.testing.averaging import eight_bits, scaled_mean
from tests.testing.right_hooks import Predictor

pytestmark = pytest.mark.usefixtures("plain_torch")


class Counts:
    """The number of steps so far."""

    def __init__(self, process_group):
        self.step = 0


def wrong_in(steps, state, bucket):
    """Average, and halve it in these steps."""
    state.step += bucket.is_last()
    return scaled_mean(0.5 if state.step in steps else 1.0)(state, bucket)


def test_what_is_inferred_of_hooks_that_average():
    assert claims_of(default_hooks.allreduce_hook).tolerance == Tolerance.rounding(torch.float32)
    assert claims_of(default_hooks.allreduce_hook).scale_equivariant
    assert claims_of(default_hooks.fp16_compress_hook).tolerance == Tolerance.rounding(torch.float16)
    assert claims_of(default_hooks.fp16_compress_hook).max_magnitude == pytest.approx(65504, rel=0.02)
    assert claims_of(default_hooks.bf16_compress_hook).precision == torch.bfloat16
    for hook in (eight_bits, *(OURS[name][0] for name in ("pertensor", "perchannel"))):
        assert claims_of(hook).tolerance == Tolerance.levels(8)
    assert claims_of(scaled_mean(1.02)).tolerance == Tolerance.levels(8)
    # A hook that averages after a wrong step is held to it.
    assert claims_of(partial(wrong_in, [3]), Counts).tolerance == Tolerance.rounding(torch.float32)


def test_no_tolerance_fits_errors_that_were_measured():
    """An average that is 4 % too large is lossy, and fails "unbiased"; one 2 % too large fails "averages"."""
    assert claims_of(scaled_mean(1.04)).is_lossy
    assert not check_hook(scaled_mean(1.04), max_examples=2, only=["unbiased"]).ok
    assert not check_hook(scaled_mean(1.02), max_examples=4, only=["averages"]).ok


def test_what_is_inferred_of_lossy_hooks():
    for factor in (0.5, 0.0):
        stateless = claims_of(scaled_mean(factor))
        assert stateless.is_lossy
        assert (stateless.unbiased, stateless.error_feedback, stateless.contraction) == (True, False, None)
    late = claims_of(partial(wrong_in, range(4, 99)), Counts)
    assert (late.start, late.unbiased, late.error_feedback, late.contraction) == (3, True, False, None)
    # The plain steps before it show fp32's rounding in fp32. In fp64 nothing coarser than fp64's is allowed.
    assert (late.precision, late.checkpoint) == (torch.float64, "any")
    for make_state, contraction in ((compressors.TopK, 0.0), (Predictor, None)):
        claims = claims_of(compressors.hook, make_state)
        assert (claims.unbiased, claims.error_feedback, claims.contraction) == (False, True, contraction)


def test_every_hook_is_to_keep_zeros_unless_it_multiplies_factors():
    claims = {name: claims_of(*hook).keeps_zeros for name, hook in OURS.items()}
    assert claims.pop("batched r=1") is None
    lines = ("PowerSGD r=1", "r=4", "PowerSGD r=1, fp16", "auto")
    assert claims == dict.fromkeys(claims, "elements") | dict.fromkeys(lines, "lines")


def test_what_is_inferred_of_power_sgd():
    for hooks in (OURS, TORCHS):
        claims = claims_of(*hooks["r=4"])
        assert (claims.start, claims.exact_rank, claims.checkpoint) == (2, 4, "safe")
        assert (claims.error_feedback, claims.errors_of is not None) == (True, True)
        assert list(map(claims.exact_shapes, ((100,), (8, 8), (64, 64)))) == [True, True, False]
    assert claims_of(*OURS["batched r=1"]).exact_rank is None
    assert claims_of(*OURS["PowerSGD r=1, fp16"]).precision == torch.float16
    options = {"start_powerSGD_iter": 2, "use_error_feedback": False}
    without = claims_of(powerSGD.powerSGD_hook, partial(powerSGD.PowerSGDState, **options))
    assert (without.error_feedback, without.errors_of) == (False, None)
    with pytest.raises(ValueError, match="start_powerSGD_iter is 1000"):
        claims_of(powerSGD.powerSGD_hook, powerSGD.PowerSGDState)
