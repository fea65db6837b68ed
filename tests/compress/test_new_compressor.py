"""The compressor of docs/new_compressor.md is all that a user writes; the state provides everything else."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradcomp.compress import Compressor, CompressorState, compress_hook
from gradcomp.testing import check_hook
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.hooks.powersgd_runs import equal, simulate

PAGE = Path(__file__).parents[2] / "docs" / "new_compressor.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
SHAPES = [(6, 5), (7,), (4, 3, 2), (5,)]
START = 2


def documented():
    """Execute the page's first block; return the two classes that it defines."""
    names = {"__name__": "documented"}
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    return names["TopK"], names["TopKOptions"]


TopK, TopKOptions = documented()


def new_state(group=None, density=0.25, **settings):
    return CompressorState(TopK, TopKOptions(density), group, **settings)


def test_it_is_short():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) < 60


def test_the_documented_check(monkeypatch):
    """The check passes, error feedback in other buckets and after a restart included."""
    reports = []

    def recorded(*arguments):
        reports.append(check_hook(*arguments, max_examples=everyday(3, 25)))
        return reports[-1]

    monkeypatch.setattr("gradcomp.testing.check_hook", recorded)
    names = {"__name__": "__main__", "TopK": TopK, "TopKOptions": TopKOptions, "compress_hook": compress_hook}
    exec(compile(BLOCKS[2], str(PAGE), "exec"), names | {"CompressorState": CompressorState})
    (report,) = reports
    for name in ("held_back_comes_out", "checkpoint_round_trip"):
        assert report.verdicts[name].outcome == "holds", name


def saved_state(rank):
    state = new_state()
    for step in range(4):
        compress_hook(state, Bucket(random_gradient(SHAPES, rank, step), SHAPES)).wait()
    return state.state_dict()


def test_options_that_do_not_fit_are_refused_as_a_whole():
    (saved,) = simulate(saved_state, 1)
    state = new_state()
    state.load_state_dict(saved)
    before = state.state_dict()
    with pytest.raises(ValueError, match="density is 2, but must be"):
        state.load_state_dict({**saved, "options": {"density": 2}})
    assert equal(state.state_dict(), before)


class NotFrozen:
    density = 0.1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (TopK(type("B", (), {"numels": [4], "dtype": None, "device": "cpu"}), TopKOptions()),),
            TypeError,
            "a subclass of Compressor",
        ),
        ((Compressor, NotFrozen()), TypeError, "a frozen dataclass or None"),
        (
            (TopK, TopKOptions(), "nccl"),
            TypeError,
            "a process group or None as its process_group, got 'nccl'",
        ),
    ],
)
def test_what_a_state_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        CompressorState(*arguments)


def test_a_start_before_ddp_has_arranged_its_buckets_is_refused():
    with pytest.raises(ValueError, match=r"start_iter is 1, but .* at least 2"):
        new_state(start_iter=1)


def test_another_state_is_refused():
    assert not dist.is_initialized()
    with pytest.raises(TypeError, match="takes a gradcomp CompressorState as its state, got None"):
        compress_hook(None, Bucket(torch.ones(3)))
