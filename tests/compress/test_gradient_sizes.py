"""Test the warning of gradients whose unit changes from step to step."""

from itertools import cycle, islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradcomp.comm.bucket import GradBucket
from gradcomp.compress.state import NUM_STEPS, GradientSizes
from gradcomp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.hooks.powersgd_runs import Messages

pytestmark = pytest.mark.usefixtures("plain_torch", "group_of_one")

SHAPES = [(32, 24), (24,), (16, 20)]
TOKENS = [32.0, 1500.0, 200.0, 60.0]


def int4(**options):
    return QuantizationState(bits=4, **options), quantization_hook


def powersgd(hook=powerSGD_hook, start=2, **options):
    return PowerSGDState(None, 2, start, **options), hook


def warnings_of(made, scales, *, dtype=torch.float32, shapes=SHAPES, change=None, rescales=False):
    """Average gradients multiplied by scales, a step each. Return the warnings of changing units, and steps.

    change: called with a step's gradient, which it may replace.
    """
    state, hook = made
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    numel, found, before = sum(each.numel() for each in parameters), [], None
    for step, scale in enumerate(scales):
        generator = torch.Generator().manual_seed(step)
        gradient = scale * (1.0 + torch.randn(numel, generator=generator))
        gradient = gradient if change is None else change(gradient, step)
        if rescales and before is not None:
            state.rescale_errors(scale / before)
        with Messages("gradcomp") as lines:
            of_step = parameters[:: 1 if step else -1]  # DDP's first step has other buckets
            hook(state, GradBucket(0, gradient.to(dtype), of_step, is_last=True)).wait()
        found += [(step, line) for line in lines if line.startswith("WARNING") and "errors keep" in line]
        before = scale
    return found


def tokens(num_steps=NUM_STEPS + 8):
    return list(islice(cycle(TOKENS), num_steps))


EVERY_OTHER = torch.arange(sum(torch.Size(shape).numel() for shape in SHAPES)) % 2 == 0
CHANGING = {
    "int4": (int4, {}),
    "int8 in fp16": (lambda: (QuantizationState(bits=8), quantization_hook), {"dtype": torch.float16}),
    "bf16": (int4, {"dtype": torch.bfloat16}),
    "PowerSGD": (powersgd, {}),
    "PowerSGD, batched, fp64": (lambda: powersgd(batched_powerSGD_hook), {"dtype": torch.float64}),
    "int8 factors": (lambda: powersgd(factor_dtype=torch.int8, start_bits=8), {}),
    "a small bucket": (lambda: int4(block_size=16), {"shapes": [(5, 16)]}),
    "zeros in one half": (int4, {"change": lambda gradient, step: gradient.masked_fill_(EVERY_OTHER, 0.0)}),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_unit_that_changes_is_told_once(name):
    make, options = CHANGING[name]
    [(step, line)] = warnings_of(make(), tokens(), **options)
    assert NUM_STEPS <= step <= NUM_STEPS + 2
    assert " 9 times in 40 steps" in line or " 10 times in 40 steps" in line  # from step 1 or 2 on
    assert "gradcomp.loss_factor" in line


def with_step(value, every):
    def change(gradient, step):
        return torch.full_like(gradient, value) if step % every == 0 else gradient

    return change


def used_rows(gradient, step):
    """Keep the gradients of a few rows, others in every step, as an embedding's."""
    generator = torch.Generator().manual_seed(step)
    rows = gradient.view(-1, 64) * 10 ** torch.randn(len(gradient) // 64, 1, generator=generator)
    return (rows * (torch.rand(len(rows), 1, generator=generator) < 0.05)).flatten()


HALVED = [2.0 ** max(16 - step, 4) for step in range(48)]
SPIKES = [10.0 if step in (9, 23) else 1.0 for step in range(48)]
ONES = [1.0] * 48
QUIET = {
    "steady": (int4, ONES, {}),
    "spikes of the loss": (int4, SPIKES, {}),
    "rescaled": (int4, tokens(), {"rescales": True}),
    "rescaled, PowerSGD": (powersgd, tokens(), {"rescales": True}),
    "a GradScaler's scale": (int4, HALVED, {"rescales": True}),
    "a GradScaler's scale, not followed": (powersgd, HALVED, {}),
    "zeros": (int4, ONES, {"change": with_step(0.0, 2)}),
    "NaN": (powersgd, ONES, {"change": with_step(float("nan"), 3)}),
    "an embedding": (int4, ONES, {"shapes": [(200, 64)], "change": used_rows}),
    "less and less": (powersgd, [0.8**step for step in range(48)], {}),
    "noise": (int4, [2.0 ** (step * step % 3) for step in range(48)], {}),
    "no error feedback": (lambda: int4(use_error_feedback=False), tokens(), {}),
    "no error feedback, PowerSGD": (lambda: powersgd(use_error_feedback=False), tokens(), {}),
    "16 bits": (lambda: (QuantizationState(bits=16), quantization_hook), tokens(), {}),
    "before compression": (lambda: powersgd(start=20), tokens(20) + ONES, {}),
    "a bucket of one element": (int4, tokens(), {"shapes": [(1,)]}),
    "an empty bucket": (int4, tokens(), {"shapes": [(0, 4)]}),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    make, scales, options = QUIET[name]
    assert warnings_of(make(), scales, **options) == []


def test_two_models_and_undone_spikes_are_no_changing_unit():
    state, undoing = (QuantizationState(bits=4) for _ in range(2))
    undoing.keep_undo = True
    models = [nn.Parameter(torch.empty(64, columns)) for columns in (64, 32)]
    with Messages("gradcomp") as lines:
        for step in range(2 * NUM_STEPS + 8):
            generator = torch.Generator().manual_seed(step)
            parameter, is_spike = models[step % 2], step % 12 == 7
            buffer = torch.randn(parameter.numel(), generator=generator) * (0.05 if step % 2 else 1.0)
            quantization_hook(state, GradBucket(0, buffer, [parameter], is_last=True)).wait()
            spiked = torch.randn(64 * 64, generator=generator) * (10.0 if is_spike else 1.0)
            quantization_hook(undoing, GradBucket(0, spiked, models[:1], is_last=True)).wait()
            if is_spike:
                undoing.undo_step()
    assert not any("errors keep" in line for line in lines)


def test_cuda_is_not_waited_for():
    """The norms are judged once the copy to the host is complete, in whichever step."""
    answers, sizes = [False, False, True], GradientSizes()
    sizes.norms = torch.tensor(tokens(NUM_STEPS))[:, None].expand(-1, 8)
    assert sizes.num_jumps() == 10
    sizes._copied = SimpleNamespace(query=lambda: answers.pop(0))
    assert [sizes.num_jumps() for _ in range(3)] == [None, None, 10]
