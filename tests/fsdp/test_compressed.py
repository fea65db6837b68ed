"""Test that sharded models train with compression between replicas, and that errors follow parameters."""

from itertools import chain

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from gradcomp.compress import load_from_dcp, per_rank_state_dict
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.powerSGD_hook import PowerSGDState
from gradcomp.hooks.quantization_hooks import QuantizationState
from tests import devices
from tests.depth import mixed
from tests.fsdp.models import (
    RANKS,
    START,
    Sum,
    batch_of,
    by_parameter,
    given_gradients,
    gradients,
    losses_of_training,
    new_grid,
    sharded,
    weights,
)
from tests.reducer.models import on_device, run_cases

STATES = {
    "PowerSGD": lambda: PowerSGDState(None, 2, START, min_compression_rate=1),
    "PowerSGD, int8 factors, quantized start": lambda: PowerSGDState(
        None, 2, START, min_compression_rate=1, factor_dtype=torch.int8, start_bits=8
    ),
    "int4": lambda: QuantizationState(None, bits=4, block_size=16),
}
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def train(rank, name, precision):
    """Return the losses, the weights at the end, the state's step, and the compression rate."""
    grid, state = new_grid(), STATES[name]()
    torch.manual_seed(0)
    model = sharded(grid.shards, mp_policy=PRECISIONS[precision])
    compress_replicas(model, grid.replicas, state)
    losses = losses_of_training(model, rank)
    return losses, weights(model), state.iter, state.compression_stats()[0]


def test_models_train_and_replicas_stay_bitwise_equal(run_ranks):
    cases = mixed(list(STATES), list(PRECISIONS))
    ranks = run_ranks(run_cases, RANKS, train, cases, timeout_s=240)
    for index, case in enumerate(cases):
        for losses, _, num_steps, rate in (results[index] for results in ranks):
            assert sum(losses[-4:]) < 0.05 * sum(losses[:4]), case
            assert num_steps == 20, case
            assert rate > 1.5, case
        for one, other in ((0, 2), (1, 3)):
            for ours, theirs in zip(ranks[one][index][1], ranks[other][index][1], strict=True):
                assert torch.equal(ours, theirs), case


def add_up(rank, name):
    """Return by parameter: Σ averages, Σ of torch's averages, and this rank's error at the end."""
    grid, state = new_grid(), STATES[name]()
    models = [sharded(mesh, Sum()) for mesh in (grid.mesh, grid.shards)]
    compress_replicas(models[1], grid.replicas, state)
    sums = [[torch.zeros_like(each) for each in weights(model)] for model in models]
    for number in range(12):
        for model, sums_of_model in zip(models, sums, strict=True):
            model.zero_grad()
            model(given_gradients(rank, number)).backward()
            for total, gradient in zip(sums_of_model, gradients(model), strict=True):
                if gradient is not None:
                    total += gradient
    errors = by_parameter(state)
    return sums[1], sums[0], [errors[name] for name, _ in models[1].named_parameters()]


def test_errors_follow_parameters_that_only_some_steps_use(run_ranks):
    """Σ averages plus the replicas' mean error is Σ mean gradients."""
    ranks = run_ranks(run_cases, RANKS, add_up, [(name,) for name in STATES], timeout_s=240)
    for index, name in enumerate(STATES):
        for one, other in ((0, 2), (1, 3)):
            (ours, exact, errors), (again, _, more_errors) = ranks[one][index], ranks[other][index]
            for total, same, expected, *held in zip(ours, again, exact, errors, more_errors, strict=True):
                assert torch.equal(total, same), name
                mean = sum(held).flatten()[: total.numel()].view_as(total) / 2
                assert (mean.norm() > 0.01 * expected.norm()) == (total.ndim == 2), name
                assert (total + mean - expected).abs().max() <= 1e-5, name


def add_up_whole_models(rank, name):
    """Return by parameter: Σ averages, Σ of this rank's gradients, and its error. A rank is a replica."""
    grid = new_grid(dist.get_world_size(), 1, devices.device_of_rank().type)
    model, state = sharded(grid.shards, Sum()), STATES[name]() if name in STATES else None
    compress_replicas(model, grid.replicas, state)
    averages, own = ([torch.zeros_like(each) for each in weights(model)] for _ in range(2))
    for number in range(12):
        given = [
            [each if each is None else on_device(each) for each in layer]
            for layer in given_gradients(rank, number)
        ]
        model.zero_grad()
        model(given).backward()
        for sums, added in ((averages, gradients(model)), (own, chain(*given))):
            for total, each in zip(sums, added, strict=True):
                if each is not None:
                    total += each
    errors = by_parameter(state) if state else {}
    names = [name for name, _ in model.named_parameters()]
    held = [
        errors[each].view_as(total) if state else 0 * total for each, total in zip(names, own, strict=True)
    ]
    return averages, own, held


def test_whole_models_on_the_ranks_devices(run_group):
    names = ("no state", *STATES)
    ranks = run_group(run_cases, add_up_whole_models, [(name,) for name in names])
    for name, results in zip(names, zip(*ranks, strict=True), strict=True):
        averages, own, held = (zip(*each, strict=True) for each in zip(*results, strict=True))
        for replicas, *rest in zip(averages, own, held, strict=True):
            gradient, error = (torch.stack(each).double().mean(0) for each in rest)
            assert all(torch.equal(each, replicas[0]) for each in replicas), name
            assert (replicas[0] + error - gradient).abs().max() <= 1e-5, name
            assert (error.norm() > 0.01 * gradient.norm()) == (gradient.ndim == 2 and name in STATES), name


def skipped(number):
    """Return the forward's options in a step. The resumed run's first two steps skip a layer."""
    return {"skip": [0] if number in (5, 6) else [], "use_spare": number % 2 == 0}


def resume(rank, folder, name, loads_first):
    """Save after five steps, and go on; load the checkpoint in a new model, and take the same steps.

    Returns (weights, errors, step) of both runs.
    """
    grid = new_grid()
    key = f"{name} of shard {grid.shard_rank}"

    def start(seed):
        torch.manual_seed(seed)
        model = sharded(grid.shards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return model, optimizer, STATES[name]()

    def run(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            model(batch_of(rank, number), **skipped(number)).square().mean().backward()
            optimizer.step()

    model, optimizer, state = start(0)
    compress_replicas(model, grid.replicas, state)
    run(model, optimizer, range(5))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer, key: per_rank_state_dict(state)}
    dcp.save(saved, checkpoint_id=folder)
    run(model, optimizer, range(5, 9))
    results = [(weights(model), by_parameter(state), state.iter)]

    model, optimizer, state = start(1)
    if loads_first:
        state.process_group = grid.replicas
        load_from_dcp(state, folder, key)
    compress_replicas(model, grid.replicas, state)
    if not loads_first:
        load_from_dcp(state, folder, key)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    run(model, optimizer, range(5, 9))
    return [*results, (weights(model), by_parameter(state), state.iter)]


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(run_ranks, tmp_path):
    chosen = mixed(list(STATES), (False, True))
    cases = [(str(tmp_path / f"{name} {first}"), name, first) for name, first in chosen]
    for results in run_ranks(run_cases, RANKS, resume, cases, timeout_s=240):
        for case, (straight, resumed) in zip(cases, results, strict=True):
            assert straight[2] == resumed[2] == 9, case
            assert straight[1].keys() == resumed[1].keys(), case
            assert any(error.any() for error in straight[1].values()), case
            for index, error in straight[1].items():
                assert torch.equal(error, resumed[1][index]), f"{case}, parameter {index}"
            for one, other in zip(straight[0], resumed[0], strict=True):
                assert torch.equal(one, other), case
