"""The compressor of docs/new_compressor.md is all that a user writes; the state provides everything else."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.compress import Compressor, CompressorState, compress_hook
from gradcomp.testing import check_hook
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient, starts
from tests.hooks.powersgd_runs import equal, simulate
from tests.kept import entry_of
from tests.ranks import RankError

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
    names = {"TopK": TopK, "TopKOptions": TopKOptions, "CompressorState": CompressorState}
    exec(compile(BLOCKS[2], str(PAGE), "exec"), names | {"compress_hook": compress_hook})
    (report,) = reports
    for name in ("held_back_comes_out", "checkpoint_round_trip"):
        assert report.verdicts[name].outcome == "holds", name


def rearranged(rank):
    """Return Σ (output − gradient), and the error left at the end.

    The parameters are in one bucket at first, then in two buckets in another order, then in one again.
    """
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    state, total = new_state(), torch.zeros(starts(SHAPES)[-1])
    for step in range(12):
        gradients = random_gradient(SHAPES, rank, step).split([p.numel() for p in parameters])
        arrangement = [[0, 1, 2, 3]] if step < 5 or step > 8 else [[3, 1], [2, 0]]
        for index, chosen in enumerate(arrangement):
            flat = torch.cat([gradients[i] for i in chosen])
            bucket = gradcomp.reducer.GradBucket(
                index, flat.clone(), [parameters[i] for i in chosen], index == len(arrangement) - 1
            )
            output = compress_hook(state, bucket).wait()
            if step >= START:
                parts = (output - flat).split([parameters[i].numel() for i in chosen])
                for i, part in zip(chosen, parts, strict=True):
                    total[starts(SHAPES)[i] : starts(SHAPES)[i + 1]] += part
    return total, torch.cat([entry_of(state, parameter)["error"].flatten() for parameter in parameters])


def test_errors_follow_their_parameters_into_other_buckets():
    totals, errors = (
        torch.stack(each).double().mean(0) for each in zip(*simulate(rearranged, 2), strict=True)
    )
    assert errors.abs().max() > 0.1
    assert (totals + errors).abs().max() < 1e-5


def other_options(rank):
    state = new_state(density=0.5 if rank else 0.25)
    compress_hook(state, Bucket(random_gradient(SHAPES, rank, 0), SHAPES)).wait()


def test_ranks_with_other_options_are_told_so(run_ranks):
    with pytest.raises(RankError, match=r"density is [\d.]+ on rank 0 and [\d.]+ on rank 1"):
        run_ranks(other_options, 2)


def saved_state(rank):
    state = new_state()
    for step in range(4):
        compress_hook(state, Bucket(random_gradient(SHAPES, rank, step), SHAPES)).wait()
    return state.state_dict()


MISFITS = {
    "another compressor": (lambda d: d.update(algorithm="RandK"), "of 'RandK', but this state is of 'TopK'"),
    "a density of 2": (lambda d: d["options"].update(density=2), "density is 2, but must be"),
    "another option": (lambda d: d["options"].update(levels=2), "options has the unknown 'levels'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_as_a_whole(misfit):
    (saved,) = simulate(saved_state, 1)
    change, message = MISFITS[misfit]
    broken, state = copy.deepcopy(saved), new_state()
    state.load_state_dict(saved)
    before = state.state_dict()
    change(broken)
    with pytest.raises((ValueError, KeyError), match=message):
        state.load_state_dict(broken)
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
    with pytest.raises(TypeError, match="takes a CompressorState as its state, got None"):
        compress_hook(None, Bucket(torch.ones(3)))
