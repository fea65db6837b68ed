"""Test states whose process group changes while they keep their memory."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks.powerSGD_hook import batched_powerSGD_hook, powerSGD_hook
from gradcomp.hooks.quantization_hooks import (
    QuantizationState,
    quantization_hook,
    quantization_pertensor_hook,
)
from tests.depth import mixed
from tests.kept import entry_of
from tests.training import Given, power_sgd

SIZE, BEFORE, AFTER = 32, 4, 40


KINDS = {
    "int4": (lambda: QuantizationState(bits=4, block_size=32), quantization_hook),
    "int8": (lambda: QuantizationState(bits=8, block_size=32), quantization_hook),
    "PowerSGD": (power_sgd, powerSGD_hook),
    "batched": (power_sgd, batched_powerSGD_hook),
    "int8 factors": (lambda: power_sgd(factor_dtype=torch.int8), powerSGD_hook),
    "per tensor": (lambda: None, quantization_pertensor_hook),
}


def gradient_of(rank, step):
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def average(ddp, rank, step):
    ddp.zero_grad()
    ddp([gradient_of(rank, step)]).backward()
    return ddp.module.weights[0].grad.clone()


def error_of(state, model):
    """Return the model's error; zeros without a state."""
    if state is None:
        return torch.zeros(SIZE, SIZE)
    return entry_of(state, model.weights[0])["error"].double()


def shrink(rank, library, store_path):
    """Train on three ranks, then on the first two, with every kind of state.

    store_path: None: a smaller group is assigned to the states. Otherwise the default group is made again.
    Returns, by kind, the averages on two ranks, and the error before and after them; None on the third rank.
    """
    found, kept = {}, []
    for name, (make, hook) in KINDS.items():
        model, state = Given((SIZE, SIZE)), make()
        ddp = library(model)
        ddp.register_comm_hook(state, hook)
        for step in range(BEFORE):
            average(ddp, rank, step)
        kept.append((name, model, state, hook))
    pair = dist.new_group([0, 1])
    if rank == 2:
        return None
    if store_path is not None:
        del ddp
        dist.destroy_process_group()
        store = dist.FileStore(store_path, 2)
        timeout = datetime.timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        pair = None
    for name, model, state, hook in kept:
        error = error_of(state, model)
        if state is not None and pair is not None:
            state.process_group = pair
        ddp = library(model, process_group=pair)
        ddp.register_comm_hook(pair if state is None else state, hook)
        outputs = [average(ddp, rank, BEFORE + step) for step in range(AFTER)]
        found[name] = torch.stack(outputs), error, error_of(state, model)
    return found


@pytest.mark.parametrize(
    ("library", "is_assigned"),
    mixed([gradcomp.DistributedDataParallel, nn.parallel.DistributedDataParallel], [True, False]),
)
def test_errors_are_kept_by_a_group_that_shrinks(run_ranks, library, is_assigned, tmp_path):
    one, two, _ = run_ranks(shrink, 3, library, None if is_assigned else str(tmp_path / "store"))
    for name in KINDS:
        outputs, before, after = zip(one[name], two[name], strict=True)
        assert torch.equal(*outputs), name
        given = sum(gradient_of(rank, BEFORE + step).double() for rank in (0, 1) for step in range(AFTER)) / 2
        owed = given + sum(before) / 2 - sum(after) / 2
        tolerance = 1e-4 if KINDS[name][0]() else 0.02  # a hook without errors loses its rounding
        error = (outputs[0].double().sum(0) - owed).norm() / owed.norm()
        assert error < tolerance, (name, error)


def merge(rank):
    """Train in halves, then over all ranks. Return those averages, and the errors before and after them."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    state = power_sgd()
    state.process_group = half
    ddp = nn.parallel.DistributedDataParallel(Given((SIZE, SIZE)), process_group=half)
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(BEFORE):
        average(ddp, rank, step)
    state.process_group = dist.group.WORLD
    before = error_of(state, ddp.module)
    return [average(ddp, rank, BEFORE + step) for step in range(AFTER)], before, error_of(state, ddp.module)


def test_errors_are_kept_by_groups_that_merge(run_ranks):
    """Their directions differ, and begin again."""
    outputs, before, after = zip(*run_ranks(merge, 4), strict=True)
    given = sum(gradient_of(rank, BEFORE + step).double() for rank in range(4) for step in range(AFTER))
    owed = (given + sum(before) - sum(after)) / 4
    for each in outputs:
        assert torch.equal(torch.stack(each), torch.stack(outputs[0]))
        assert (sum(each).double() - owed).norm() < 1e-4 * owed.norm()
