"""One rank makes a call that all ranks must make: every rank's error names the call, by the time-out."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.compress import Recorder, consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.frameworks import CommHook
from gradcomp.hooks.default_hooks import allreduce_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook

TIMEOUT = timedelta(seconds=3)


CALLS = {
    "consolidated_state_dict": (
        lambda state, _: CommHook(state, quantization_hook).state_dict(),
        "save the state of quantization_hook",
    ),
    "load_from_dcp": (load_from_dcp, "load the state of quantization_hook"),
    "Recorder.complete": (
        lambda state, _: Recorder(state).complete(),
        "find the relative errors of the recorded rows",
    ),
}


def messages(rank, call, folder):
    """Make the call on rank 0 alone, while rank 1 goes on averaging; return this rank's error message."""
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    state, model = QuantizationState(), gradcomp.DistributedDataParallel(nn.Linear(32, 32))
    model.register_comm_hook(state, quantization_hook)
    for _ in range(3):
        model(torch.ones(2, 32)).sum().backward()
    state.process_group = group
    try:
        if rank == 0:
            CALLS[call][0](state, folder)
        else:
            gradcomp.average_([torch.ones(8)], allreduce_hook, group)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("call", CALLS)
def test_every_rank_is_told(run_ranks, call, tmp_path):
    alone, other = run_ranks(messages, 2, call, tmp_path)
    expected = f"rank 0 of 2 could not {CALLS[call][1]}: rank 1 has not come to {call} within the time-out."
    assert alone.startswith(expected)
    # Its next collective: the group's first average agrees on the delay of the links.
    assert other.startswith("rank 1 of 2 could not agree on the delay of the links: [")
    assert f"rank 0 has come to {call}, which all ranks must call." in other
    for message in (alone, other) if call == "consolidated_state_dict" else ():
        assert "a save on some ranks only, under `if is_main_process` say. Call accelerator" in message


def together_after_alone(rank):
    """Save on one rank alone, which raises an error; then save on both."""
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    state = QuantizationState(group)
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 has not come to consolidated_state_dict"):
            consolidated_state_dict(state)
    dist.barrier()
    state.process_group = None
    first = consolidated_state_dict(state)
    state.process_group = group
    return first == consolidated_state_dict(state), bool(per_rank_state_dict(state))


def test_a_save_on_every_rank_succeeds_after_one_that_failed(run_ranks):
    assert run_ranks(together_after_alone, 2) == [(True, True)] * 2


def unannounced(rank):
    """Save on all ranks, then average on rank 0 alone; return rank 0's message."""
    consolidated_state_dict(QuantizationState())
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            gradcomp.average_([torch.ones(8)], process_group=group)
        return str(raised.value)
    return ""


def test_a_save_that_all_ranks_came_to_is_not_named(run_ranks):
    message, _ = run_ranks(unannounced, 2)
    assert "another rank has ended, raised an error, left this step out" in message
    assert "has come to" not in message
