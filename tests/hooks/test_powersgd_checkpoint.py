"""Test saving and loading PowerSGD's state: complete, without process group, for other world sizes."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket
from tests.hooks.powersgd_runs import START, Messages, equal, new_state, reload, run_steps


@pytest.mark.simulated_ranks(2)
def test_a_loaded_state_continues_bitwise_after_gradients_of_low_rank(rank):
    """Copy a state that has seen gradients of rank 1 only. Some of its directions may be zero."""
    state = new_state(matrix_approximation_rank=4, use_error_feedback=False)
    shape = [(64, 48)]
    for step in range(START + 3):
        generator = torch.Generator().manual_seed(step)
        column, row = torch.randn(64, 1, generator=generator), torch.randn(1, 48, generator=generator)
        powerSGD_hook.powerSGD_hook(state, Bucket((column @ row).flatten(), shape)).wait()
    with Messages():
        other = reload(state)
    original, loaded = [run_steps(each, rank, range(50, 54), shape) for each in (state, other)]
    assert equal(original, loaded)


@pytest.mark.simulated_ranks(1)
def test_a_state_dict_is_not_changed_by_later_steps(rank):
    state = new_state()
    run_steps(state, rank, range(START + 2))
    saved = state.state_dict()
    kept = copy.deepcopy(saved)
    other = new_state()
    other.load_state_dict(saved)
    unused = other.state_dict()
    run_steps(state, rank, [50, 51])
    run_steps(other, rank, [60, 61])
    assert (equal(saved, kept), equal(unused, kept)) == (True, True)


@pytest.mark.ranks(2)
def test_the_process_group_is_left_out(rank):
    """Saving warns once. Loading sets the default group, and warns once. state_dict() does not warn."""
    group = dist.new_group([0, 1])
    state = new_state(process_group=group)
    with Messages() as on_saving:
        file = io.BytesIO()
        torch.save({"comm_hook": powerSGD_hook.powerSGD_hook, "comm_hook_state": state}, file)
    with Messages() as on_loading:
        file.seek(0)
        loaded = torch.load(file)["comm_hook_state"]
    kept = new_state(process_group=group)
    kept.load_state_dict(state.state_dict())
    on_saving, on_loading, *facts = (
        on_saving,
        on_loading,
        "process_group" in state.state_dict(),
        state.process_group is group,
        loaded.process_group is dist.group.WORLD,
        kept.process_group is group,
    )
    assert on_saving == ["WARNING NOTE: Process group is not serializable and excluded from a saved state."]
    assert len(on_loading) == 1
    assert on_loading[0].startswith(
        "WARNING NOTE: Process group will be set to a default group (i.e. the world size)."
    )
    assert facts == [False, True, True, True]


def test_loading_without_a_process_group():
    """A state loaded before init_process_group, for example to inspect it, has no process group."""
    assert not dist.is_initialized()
    with Messages():
        assert reload(new_state()).process_group is None


def test_average_errors_of_nothing():
    with pytest.raises(ValueError, match="takes the state_dicts of all ranks, got none"):
        powerSGD_hook.average_errors([])
    with Messages():
        one = new_state().state_dict()
    with pytest.raises(ValueError, match=r"number 0 has {'step': 0, .* and number 1 has {'step': 3, "):
        powerSGD_hook.average_errors([one, {**one, "iter": 3}])
    with pytest.raises(TypeError, match=r"expected what state_dict\(\) gives, got PowerSGDState"):
        powerSGD_hook.average_errors([new_state(), new_state()])
