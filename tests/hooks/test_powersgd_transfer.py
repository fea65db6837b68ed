"""Test that PowerSGD's errors move to another world size, in one file or in torch.distributed.checkpoint."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import FEW_SHAPES, OTHER_SHAPES, START, Messages, equal, new_state, reload
from tests.kept import directions_in, error_in
from tests.ranks import of_all_ranks
from tests.tolerances import MEAN_ERROR, ONE_STEP

NO_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def train(state, rank, steps):
    """Take steps of two buckets; return (Σ this rank's gradients, Σ outputs) in float64."""
    sums = 0, 0
    for step in steps:
        flat = []
        for index, shapes in enumerate((FEW_SHAPES, OTHER_SHAPES)):
            gradient = random_gradient(shapes, rank, step)
            bucket = Bucket(gradient.clone(), shapes, index, index == 1)
            flat.append((gradient.double(), powerSGD_hook.powerSGD_hook(state, bucket).wait().double()))
        sums = [total + torch.cat(parts) for total, parts in zip(sums, zip(*flat, strict=True), strict=True)]
    return sums


def errors_of(state_dict):
    return error_in(state_dict).double()


def consolidate(rank, path):
    """Take steps, save in torch's distributed checkpoint, and consolidate without pickled collectives.

    Returns (the sums of the steps, this rank's state_dict, the state_dict for all ranks).
    """
    state = new_state()
    sums = train(state, rank, range(START + 4))
    before = state.state_dict()
    dcp.save({"app": {"powersgd": powerSGD_hook.per_rank_state_dict(state)}}, checkpoint_id=path)
    with pytest.MonkeyPatch.context() as patch:
        for name in NO_OBJECTS:
            patch.delattr(dist, name)
        merged = powerSGD_hook.consolidated_state_dict(state)
    assert equal(state.state_dict(), before), "it changed the state"
    again, loaded = new_state(), copy.deepcopy(before)
    for entry in loaded["parameters"].values() if rank == 0 else ():  # strides may differ between ranks
        entry["error"] = entry["error"].mT.contiguous().mT if entry["error"].dim() > 1 else entry["error"]
    again.load_state_dict(loaded)
    assert equal(powerSGD_hook.consolidated_state_dict(again), merged), "not the same before a step"
    return sums, before, merged


def go_on(rank, saved, path):
    """Load the state_dict and take steps; return their sums, the state_dict after them, and the log.

    Checks that torch's distributed checkpoint loads the same.
    """
    state, other = new_state(), new_state(matrix_approximation_rank=1)
    with Messages() as said:
        powerSGD_hook.load_from_dcp(other, path, "app.powersgd")
        state.load_state_dict(saved)
        loaded = other.state_dict()
        assert relative(errors_of(loaded), errors_of(saved)) <= MEAN_ERROR
        assert all(loaded[name] == saved[name] for name in ("options", "iter"))
        sums = train(state, rank, range(50, 54))
    return sums, state.state_dict(), said


def test_one_checkpoint_for_another_world_size(run_ranks, tmp_path):
    """Σ outputs + mean error = Σ mean gradients, across the change."""
    before, after = 2, 3
    first = run_ranks(consolidate, before, tmp_path)
    merged = first[0][2]
    assert all(equal(other, merged) for _, _, other in first)
    assert merged["errors_of"] == {"rank": None, "world_size": before}
    own = [each for _, each, _ in first]
    kept = copy.deepcopy(own)
    averaged = powerSGD_hook.average_errors(own)
    assert equal(own, kept), "it changed its arguments"
    assert equal(directions_in(averaged), directions_in(own[0]))
    assert relative(errors_of(merged), errors_of(averaged)) <= MEAN_ERROR
    assert {**merged, "parameters": 0} == {**averaged, "parameters": 0}
    second = run_ranks(go_on, after, reload(merged), tmp_path)
    assert [said for *_, said in second] == [[]] * after, "a mean is everyone's"
    gradients = sum(torch.stack([sums[0] for sums, *_ in ranks]).mean(0) for ranks in (first, second))
    outputs = first[0][0][1] + second[0][0][1]
    owed = torch.stack([errors_of(state_dict) for _, state_dict, _ in second]).mean(0)
    assert relative(outputs + owed, gradients) <= ONE_STEP


@pytest.mark.ranks(2)
def test_consolidating_leaves_the_state_and_compares_the_ranks(rank):
    """Consolidate a loaded float64 state_dict: the caller's tensors must not be summed in place."""
    state = new_state()
    for step in range(START + 1):
        gradient = random_gradient(FEW_SHAPES, rank, step, torch.float64)
        powerSGD_hook.powerSGD_hook(state, Bucket(gradient, FEW_SHAPES)).wait()
    saved = state.state_dict()
    kept, loaded = copy.deepcopy(saved), new_state()
    loaded.load_state_dict(saved)
    merged = powerSGD_hook.consolidated_state_dict(loaded)
    late = new_state()
    late.iter = rank
    with pytest.raises(
        RuntimeError, match="PowerSGD's state differs between the ranks: step is 0 on rank 0 and 1"
    ):
        powerSGD_hook.consolidated_state_dict(late)
    late.iter, late.gradient_scale = 0, 1024.0 * (1 + rank)
    with pytest.raises(RuntimeError, match=r"gradient_scale is 1024\.0 on rank 0 and 2048"):
        powerSGD_hook.consolidated_state_dict(late)
    ranks = of_all_ranks((equal(saved, kept), error_in(merged), error_in(saved)))
    for unchanged, mean, _ in ranks:
        assert unchanged
        assert torch.equal(mean, (ranks[0][2] + ranks[1][2]) / 2)


def test_what_is_no_state_is_refused():
    for function in (powerSGD_hook.consolidated_state_dict, powerSGD_hook.per_rank_state_dict):
        with pytest.raises(
            TypeError, match=rf"{function.__name__} takes the state of a compressing hook, got dict"
        ):
            function({})
        with pytest.raises(
            RuntimeError, match=rf"{function.__name__} .* call torch.distributed.init_process_group"
        ):
            function(new_state())


def load_one_ranks_errors(rank, file):
    """Load rank 0's file on every rank, by load_state_dict and by torch.load; return the log of each.

    The third value is the log of errors that are this rank's own, and of a state without errors.
    """
    saved = torch.load(io.BytesIO(file))
    with Messages() as when_loaded:
        state = new_state()
        state.load_state_dict(saved["state_dict"])
        train(state, rank, [50])
    with Messages() as when_used:
        state = torch.load(io.BytesIO(file))["state"]
        told = len(when_used)
        train(state, rank, [50, 51])
    with Messages() as of_its_own:
        state = new_state()
        here = {"rank": rank, "world_size": dist.get_world_size()}
        state.load_state_dict(saved["state_dict"] | {"errors_of": here})
    with Messages() as of_nothing:
        empty = new_state()
        empty.load_state_dict(empty.state_dict() | {"errors_of": {"rank": 7, "world_size": 8}})
    return when_loaded[1:], when_used[told:], of_its_own[1:] + of_nothing[1:]


def save_one_ranks_errors(rank):
    state, file = new_state(), io.BytesIO()
    train(state, rank, range(START + 2))
    with Messages():
        torch.save({"state": state, "state_dict": state.state_dict()}, file)
    return file.getvalue()


def test_one_ranks_errors_on_another_rank_are_noticed(run_ranks):
    file = run_ranks(save_one_ranks_errors, 2)[0]
    for world_size in (2, 3):
        ranks = run_ranks(load_one_ranks_errors, world_size, file)
        for rank, (when_loaded, when_used, silent) in enumerate(ranks):
            assert when_loaded == when_used
            if (rank, world_size) == (0, 2):
                assert when_loaded == []
            else:
                (line,) = when_loaded
                assert line.startswith(
                    f"WARNING PowerSGD: the errors loaded on rank {rank} of {world_size} "
                    "belong to rank 0 of 2."
                )
                assert "consolidated_state_dict(state)" in line
            assert silent == []


def load_wrongly_with_dcp(rank, path):
    messages = []
    saved, state = new_state(), new_state()
    train(saved, rank, range(START + 2))
    dcp.save({"powersgd": saved}, checkpoint_id=path)
    before = state.state_dict()
    with pytest.raises(ValueError, match="Likely cause") as error:
        dcp.load({"powersgd": state}, checkpoint_id=path)
    messages.append(str(error.value))
    with pytest.raises(KeyError) as error:
        powerSGD_hook.load_from_dcp(state, path)
    messages.append(str(error.value))
    return messages, equal(state.state_dict(), before)


def test_a_states_own_state_dict_in_torchs_distributed_checkpoint(run_ranks, tmp_path):
    for (filled, missing), unchanged in run_ranks(load_wrongly_with_dcp, 2, tmp_path):
        assert "save per_rank_state_dict(state), and load it with load_from_dcp" in filled
        assert "has no 'powersgd.rank 0 of 2': save {'powersgd': per_rank_state_dict(state)}" in missing
        assert unchanged
