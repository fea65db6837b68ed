"""Test how errors follow the parameters of sharded models: through steps, checkpoints, other meshes."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard

from gradcomp.compress import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.fsdp import compress_reduce_scatter, compress_replicas
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
    new_grid,
    sharded,
    weights,
)
from tests.fsdp.scenarios import step
from tests.hooks.powersgd_runs import Messages
from tests.reducer.models import run_cases
from tests.training import power_sgd, train

# Options of compress_reduce_scatter's state, and states of compress_replicas.
SHARDS = {"4 bits": {"bits": 4}, "hierarchical": {"bits": 4, "ranks_per_node": 2}}
REPLICAS = {
    "no state": lambda: None,
    "PowerSGD": lambda: power_sgd(start=START, min_compression_rate=1),
    "PowerSGD, int8 factors, quantized start": lambda: power_sgd(
        start=START, min_compression_rate=1, factor_dtype=torch.int8, start_bits=8
    ),
    "int4": lambda: QuantizationState(None, bits=4, block_size=16),
}
FORMS = [*SHARDS, *list(REPLICAS)[1:]]


def state_of(form):
    return QuantizationState(block_size=16, **SHARDS[form]) if form in SHARDS else REPLICAS[form]()


class Run:
    """A sharded model, its optimizer and its state. seed: of the weights."""

    def __init__(self, form, seed=0, model=None, num_shards=2, device="cpu", **options):
        torch.manual_seed(seed)
        num_shards = dist.get_world_size() if form in SHARDS else num_shards
        self.grid = new_grid(dist.get_world_size() // num_shards, num_shards, device)
        self.model = sharded(self.grid.shards, model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.state, self.is_of_shards = state_of(form), form in SHARDS
        self.key = "codes" if self.is_of_shards else f"codes of shard {self.grid.shard_rank}"

    def compress(self):
        if self.is_of_shards:
            compress_reduce_scatter(self.model, self.state)
        else:
            compress_replicas(self.model, self.grid.replicas, self.state)
        return self

    def train(self, rank, numbers):
        """Train. The resumed run's first two steps, 5 and 6, skip a layer."""

        def loss_of(model, number):
            skip = [0] if number in (5, 6) else []
            return model(batch_of(rank, number), skip, use_spare=number % 2 == 0).square().mean()

        train(self.model, loss_of, numbers, optimizer=self.optimizer)
        return self

    def save(self, folder):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        saved = {"model": of_model, "optimizer": of_optimizer, self.key: per_rank_state_dict(self.state)}
        dcp.save(saved, checkpoint_id=folder)

    def load(self, folder):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    def results(self):
        return weights(self.model), by_parameter(self.state), self.state.iter


def mean_over(group, errors):
    """Return the errors' means over a group's ranks, by name."""
    means = {name: error.clone() for name, error in errors.items()}
    for mean in means.values():
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return means


def add_up(rank, form, num_shards=2, device=None):
    """Return by parameter: Σ averages, Σ mean gradients, the mean error and this rank's error.

    num_shards: of each of the replicas. Errors are then of this rank's shard, and so is what is returned.
    """
    device = torch.device(device or devices.device_of_rank())
    run = Run(form, model=Sum(), num_shards=num_shards, device=device.type).compress()
    parameters = dict(run.model.named_parameters())
    totals, expected = ([torch.zeros(each.shape) for each in parameters.values()] for _ in range(2))
    for number in range(12):
        of_ranks = [given_gradients(each, number) for each in range(dist.get_world_size())]
        given = [[each if each is None else each.to(device) for each in layer] for layer in of_ranks[rank]]
        run.model.zero_grad()
        run.model(given).backward()
        for total, mean, parameter, *each in zip(
            totals, expected, parameters.values(), *(chain(*layers) for layers in of_ranks), strict=True
        ):
            if parameter.grad is not None:
                total += parameter.grad.full_tensor().cpu()
                mean += torch.stack(each).mean(0)
    if not run.is_of_shards:
        totals, expected = (
            [t.chunk(num_shards)[run.grid.shard_rank] for t in each] for each in (totals, expected)
        )
    own = by_parameter(run.state) if run.state else {}
    mean = mean_over(run.grid.shards.get_group() if run.is_of_shards else run.grid.replicas, own)
    zero = torch.zeros(0)
    return [
        (total, gradient, mean.get(name, zero).cpu(), own.get(name, zero).cpu())
        for name, total, gradient in zip(parameters, totals, expected, strict=True)
    ]


def check_sums(form, ranks):
    """Check that Σ averages plus the mean error is Σ mean gradients, and equal on the ranks of a shard."""
    for results in ranks:
        for total, expected, mean, own in results:
            if form != "no state":
                mean = mean.flatten()[: total.numel()].view_as(total)
                assert (mean.norm() > 0.001 * expected.norm()) == (total.ndim == 2), form
                expected = expected - mean
            assert (total - expected).abs().max() <= 1e-5, form
            if form == "hierarchical" and total.ndim == 2:
                # This rank quantizes the rows of two of the four shards.
                assert 0 < own.view_as(total).any(1).nonzero().numel() <= -(-len(total) // 4) * 2
    for one, other in zip(ranks, ranks[len(ranks) // 2 :], strict=False):
        assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(one, other, strict=True)), form


def test_nothing_is_lost_though_only_some_steps_use_a_parameter(run_ranks):
    ranks = run_ranks(run_cases, RANKS, add_up, [(form, 2, "cpu") for form in FORMS], timeout_s=240)
    for form, results in zip(FORMS, zip(*ranks, strict=True), strict=True):
        check_sums(form, results)


def test_whole_models_on_the_ranks_devices(run_group):
    """A rank is a replica."""
    ranks = run_group(run_cases, add_up, [(form, 1) for form in REPLICAS])
    for form, results in zip(REPLICAS, zip(*ranks, strict=True), strict=True):
        check_sums(form, results)


def resume(rank, folder, form, loads_first):
    """Save after five steps, and go on; load the checkpoint in a new model, and take the same steps.

    Returns (weights, errors, step) of both runs.
    """
    whole = Run(form).compress().train(rank, range(5))
    whole.save(folder)
    resumed = Run(form, seed=1)
    if loads_first:
        resumed.state.process_group = None if resumed.is_of_shards else resumed.grid.replicas
        load_from_dcp(resumed.state, folder, resumed.key)
    resumed.compress()
    if not loads_first:
        load_from_dcp(resumed.state, folder, resumed.key)
    resumed.load(folder)
    return [run.train(rank, range(5, 9)).results() for run in (whole, resumed)]


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(run_ranks, tmp_path):
    chosen = mixed(FORMS, (False, True))
    cases = [(str(tmp_path / f"{form} {first}"), form, first) for form, first in chosen]
    for results in run_ranks(run_cases, RANKS, resume, cases, timeout_s=240):
        for case, (straight, resumed) in zip(cases, results, strict=True):
            assert straight[2] == resumed[2] == 9, case
            assert straight[1].keys() == resumed[1].keys(), case
            assert any(error.any() for error in straight[1].values()), case
            for name, error in straight[1].items():
                assert torch.equal(error, resumed[1][name]), f"{case}, {name}"
            assert all(map(torch.equal, straight[0], resumed[0])), case


def save_run(rank, folder, form):
    run = Run(form).compress().train(rank, range(5))
    run.save(folder)
    return mean_over(None, by_parameter(run.state)), consolidated_state_dict(run.state)


def load_run(rank, folder, form):
    """Load on another number of ranks. Returns the mean errors before and after two steps that sum zeros."""
    run = Run(form, seed=1).compress()
    run.load(folder)
    load_from_dcp(run.state, folder, "codes")
    loaded = mean_over(None, by_parameter(run.state))
    received = {name: torch.zeros(each.shape) for name, each in run.model.named_parameters()}
    for _ in range(2):
        run.model.zero_grad()
        (0.0 * run.model(batch_of(rank, 0), use_spare=True).sum()).backward()
        for name, each in run.model.named_parameters():
            received[name] += each.grad.full_tensor()
    return loaded, received, mean_over(None, by_parameter(run.state))


@pytest.mark.parametrize(("form", "numbers"), mixed(["4 bits", "hierarchical"], [(RANKS, 2), (2, RANKS)]))
def test_another_number_of_shards_keeps_the_mean_error(run_ranks, tmp_path, form, numbers):
    saved_by, loaded_by = numbers
    forms = [form if number == RANKS else "4 bits" for number in numbers]
    ((mean, consolidated), *_) = run_ranks(save_run, saved_by, str(tmp_path), forms[0])
    assert any(error.any() for error in mean.values())
    assert set(consolidated["parameters"]) == set(mean)
    for loaded, received, left in run_ranks(load_run, loaded_by, str(tmp_path), forms[1]):
        for name, error in mean.items():
            assert (loaded[name] - error).abs().max() <= 1e-6 * error.abs().max(), name
            # Whatever the steps bring is what the mean error lacks afterwards.
            assert (received[name] + left[name] - error).abs().max() <= 1e-5 * error.abs().max(), name
        assert any(each.any() for each in received.values())


def by_columns(parameter):
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def in_columns(rank, folder, loads):
    """Take a step; save, or load before it. Returns the errors, and warnings of errors that start at zero."""
    run = Run("4 bits", shard_placement_fn=by_columns).compress()
    if loads:
        load_from_dcp(run.state, folder, run.key)
    with Messages("gradcomp.hooks.quantization_hooks") as lines:
        step(run.model, rank, 0)
    if not loads:
        run.save(folder)
    return by_parameter(run.state), [line for line in lines if "start at zero" in line]


def test_other_shards_of_columns_start_at_zero(run_ranks, tmp_path):
    ((errors, _), *_) = run_ranks(in_columns, RANKS, str(tmp_path), False)
    assert errors["embed.weight"].any()
    for loaded_by, num_warnings in ((RANKS, 0), (2, 1)):
        for _, lines in run_ranks(in_columns, loaded_by, str(tmp_path), True):
            assert len(lines) == num_warnings, lines
