"""Checkpoints that an earlier commit has saved load, and go on with the values that this commit got then.

`python -m tests.compress.test_earlier_checkpoints` saves them: only where the format changes on purpose.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import gradcomp
from gradcomp.hooks import AutoState, QuantizationState, auto_hook, quantization_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.local_steps import LocalSteps
from tests.kept import entries_in

SAVED = Path(__file__).parent / "data" / "checkpoints.pt"
SHAPES = [(8, 10), (5,), (10, 8)]
SAVED_AT, STEPS = 5, 4
HOOKS = {
    "PowerSGD": (lambda: PowerSGDState(None, 1, 2, min_compression_rate=1), powerSGD_hook),
    "int4": (lambda: QuantizationState(bits=4, block_size=16), quantization_hook),
    "auto": (lambda: AutoState(candidates=["int4:64", "bf16"], start_iter=2, clock=lambda: 0.0), auto_hook),
    "LocalSteps": (lambda: QuantizationState(bits=8, block_size=16), quantization_hook),
}


def moved(step, shape, place):
    """Return numbers that no processor rounds: multiples of 1/8."""
    return ((torch.arange(shape.numel()) * 7 + step * 5 + place) % 13 - 6).view(shape) / 8


class Run:
    def __init__(self, kind):
        make, self.hook = HOOKS[kind]
        self.state, self.model, self.step = make(), nn.ParameterList(map(torch.zeros, SHAPES)), 0
        self.kept = self.state
        if kind == "LocalSteps":
            momentum = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
            self.kept = LocalSteps(self.model, momentum, every=1, hook=self.hook, state=self.state)
        else:
            self.state.number_parameters(self.model.named_parameters())

    @torch.no_grad()
    def steps(self, num_steps):
        """Return the last step's averages, or weights."""
        for _ in range(num_steps):
            parts = [moved(self.step, each.shape, i) for i, each in enumerate(self.model)]
            self.step += 1
            if self.kept is not self.state:
                torch._foreach_sub_(list(self.model), parts)
                self.kept.step()
            else:
                gradcomp.average_(parts, self.hook, self.state, keys=[*"012"])
        return [each.clone() for each in (self.model if self.kept is not self.state else parts)]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.usefixtures("plain_torch", "group_of_one")
def test_earlier_checkpoints_go_on(kind):
    saved, model, expected = torch.load(SAVED)[kind]
    run = Run(kind)
    run.model.load_state_dict(model)
    run.step = SAVED_AT
    run.kept.load_state_dict(saved)
    entries = entries_in(saved["hook_state"][0] if "hook_state" in saved else saved)
    assert run.state.state.keys() == entries.keys()
    for key, entry in run.state.state.items():
        torch.testing.assert_close(entry, entries[key], rtol=0, atol=0)
    assert any(entry["error"].any() for entry in entries.values())
    # The processor rounds PowerSGD's products.
    rounding = 1e-6 if kind == "PowerSGD" else 0.0
    torch.testing.assert_close(run.steps(STEPS), expected, rtol=rounding, atol=rounding)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    files = {}
    for kind in HOOKS:
        run = Run(kind)
        run.steps(SAVED_AT)
        before = {name: each.clone() for name, each in run.model.state_dict().items()}
        files[kind] = run.kept.state_dict(), before, run.steps(STEPS)
    torch.save(files, SAVED)
