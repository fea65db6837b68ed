"""Test the line that says when compression starts: its step, its rank, and how users silence it."""

import io
import os
from contextlib import redirect_stderr

import pytest

from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.testing import check_hook
from tests.hooks.powersgd_runs import Messages

BYTES = "of 54.08 kB per step and rank"
ALONE = "; one rank sends nothing: its results show what compression loses, not what it saves"
LINE = f"gradcomp: PowerSGD compresses from step 3 on: 8.7 times fewer bytes, 6.21 kB {BYTES}"
PROGRAM = """
import logging
import torch
import torch.distributed as dist
from gradcomp import Reducer
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

{configure}
if not dist.is_initialized():
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 144))
reducer = Reducer(model.parameters(), bucket_cap_mb=0.02)
state = PowerSGDState(None, 4, start_powerSGD_iter=3{options})
reducer.register_comm_hook(state, powerSGD_hook)
for step in range(6):
    model(torch.ones(2, 64)).sum().backward()
    if step == 4:
        state.load_state_dict(state.state_dict())
print("done")
dist.barrier()
del reducer
dist.destroy_process_group()
"""


def said(rank, configure="", options="", environment=None):
    """Return the program's lines on stderr that announce compression. In a process of its own."""
    os.environ |= environment or {}
    with redirect_stderr(io.StringIO()) as text:
        exec(PROGRAM.format(configure=configure, options=options), {})
    return [line for line in text.getvalue().splitlines() if "compresses" in line]


def test_it_is_said_once_without_any_configuration(run_ranks):
    assert run_ranks(said, 1) == [[LINE + ALONE]]


def test_a_quantized_start_is_said_too(run_ranks):
    (lines,) = run_ranks(said, 1, "", ", start_bits=4")
    assert lines == [
        "gradcomp: the quantized start of PowerSGD compresses from step 0 on: 7.0 times fewer bytes, 7.70 kB "
        f"{BYTES}{ALONE}",
        LINE + ALONE,
    ]


def test_a_delay_is_said_too(run_ranks):
    """The largest that a rank is given."""
    lines, none = run_ranks(said_with_a_delay, 2)
    assert lines == [f"{LINE}; a message and its answer take 53 ms"]
    assert none == []


def said_with_a_delay(rank):
    return said(rank, environment={"GRADCOMP_ROUND_TRIP_MS": str(20 + 33 * rank)})


@pytest.mark.parametrize(("value", "lines"), [("1", []), ("true", []), ("0", [LINE + ALONE])])
def test_the_environment_silences_it(run_ranks, value, lines):
    assert run_ranks(said, 1, "", "", {"GRADCOMP_QUIET": value}) == [lines]


@pytest.mark.parametrize(
    ("configure", "lines"),
    [
        ("logging.basicConfig(level=logging.INFO)", [f"INFO:{LINE.replace(': ', ':', 1)}{ALONE}"]),
        ("logging.basicConfig(level=logging.WARNING)", []),
        ("logging.getLogger('gradcomp').setLevel(logging.WARNING)", []),
        ("logging.disable(logging.INFO)", []),
    ],
)
def test_logging_takes_over_once_it_is_configured(run_ranks, configure, lines):
    assert run_ranks(said, 1, configure) == [lines]


@pytest.mark.usefixtures("plain_torch")
def test_the_kit_says_nothing(capfd):
    """The kit makes hundreds of states."""
    with Messages("gradcomp") as lines:
        check_hook(quantization_hook, QuantizationState, max_examples=1, only=["finite_in_finite_out"])
    assert not [line for line in lines if "compresses" in line]
    assert "compresses" not in capfd.readouterr().err
