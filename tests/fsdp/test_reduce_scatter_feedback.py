"""Test how errors of compress_reduce_scatter follow parameters: through steps, checkpoints, other meshes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.fsdp import compress_reduce_scatter
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import mixed
from tests.fsdp.models import RANKS, Net, Sum, batch_of, by_parameter, given_gradients, sharded, weights
from tests.hooks.powersgd_runs import Messages
from tests.reducer.models import run_cases

FORMS = {"4 bits": {"bits": 4}, "8 bits": {"bits": 8}, "hierarchical": {"bits": 4, "ranks_per_node": 2}}


def all_shards():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def state_of(form):
    return QuantizationState(block_size=16, **FORMS[form])


def add_whole(sums, model):
    """Add a model's gradients, gathered, to sums."""
    for total, parameter in zip(sums, model.parameters(), strict=True):
        if parameter.grad is not None:
            total += parameter.grad.full_tensor()


def mean_errors(*states):
    """Return the mean over all ranks of the sum of several states' errors, by the name of the parameter."""
    errors = {}
    for state in states:
        for name, error in by_parameter(state).items():
            errors[name] = errors.get(name, 0.0) + error
    for error in errors.values():
        dist.all_reduce(error)
        error /= dist.get_world_size()
    return errors


def add_up(rank, form):
    """Return by parameter: Σ averages, Σ of torch's averages, the mean error, and this rank's error."""
    state = state_of(form)
    models = [sharded(all_shards(), Sum()) for _ in range(2)]
    compress_reduce_scatter(models[1], state)
    sums = [[torch.zeros(each.shape) for each in model.parameters()] for model in models]
    for number in range(12):
        for model, sums_of_model in zip(models, sums, strict=True):
            model.zero_grad()
            model(given_gradients(rank, number)).backward()
            add_whole(sums_of_model, model)
    own, mean = by_parameter(state), mean_errors(state)
    names = [name for name, _ in models[1].named_parameters()]
    return sums[1], sums[0], [mean[name] for name in names], [own[name] for name in names]


def test_nothing_is_lost_though_only_some_steps_use_a_parameter(run_ranks):
    """Σ averages plus the ranks' mean error is Σ mean gradients."""
    ranks = run_ranks(run_cases, RANKS, add_up, [(form,) for form in FORMS], timeout_s=240)
    for index, form in enumerate(FORMS):
        for results in ranks:
            for total, expected, mean, own in zip(*results[index], strict=True):
                assert (mean.norm() > 0.001 * expected.norm()) == (total.ndim == 2), form
                assert (total + mean.view_as(total) - expected).abs().max() <= 1e-5, form
                if form == "hierarchical" and total.ndim == 2:
                    # This rank quantizes the rows of two of the four shards.
                    rows = own.view_as(total).any(1).nonzero().numel()
                    assert 0 < rows <= -(-len(total) // 4) * 2


def skipped(number):
    """Return the forward's options in a step. The resumed run's first two steps skip a layer."""
    return {"skip": [0] if number in (5, 6) else [], "use_spare": number % 2 == 0}


class Run:
    """A model, its optimizer and its state. seed: of the weights."""

    def __init__(self, form, seed):
        torch.manual_seed(seed)
        self.model = sharded(all_shards())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.state = state_of(form)

    def train(self, rank, numbers):
        for number in numbers:
            self.optimizer.zero_grad()
            self.model(batch_of(rank, number), **skipped(number)).square().mean().backward()
            self.optimizer.step()

    def save(self, folder):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        saved = {"model": of_model, "optimizer": of_optimizer, "codes": per_rank_state_dict(self.state)}
        dcp.save(saved, checkpoint_id=folder)

    def load(self, folder):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    def results(self):
        return weights(self.model), by_parameter(self.state), self.state.iter


def resume(rank, folder, form, loads_first):
    """Save after five steps, and go on; load the checkpoint in a new model, and take the same steps.

    Returns (weights, errors, step) of both runs.
    """
    run = Run(form, seed=0)
    compress_reduce_scatter(run.model, run.state)
    run.train(rank, range(5))
    run.save(folder)
    run.train(rank, range(5, 9))
    results = [run.results()]

    run = Run(form, seed=1)
    if loads_first:
        load_from_dcp(run.state, folder, "codes")
    compress_reduce_scatter(run.model, run.state)
    if not loads_first:
        load_from_dcp(run.state, folder, "codes")
    run.load(folder)
    run.train(rank, range(5, 9))
    return [*results, run.results()]


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(run_ranks, tmp_path):
    chosen = mixed(list(FORMS), (False, True))
    cases = [(str(tmp_path / f"{form} {first}"), form, first) for form, first in chosen]
    for results in run_ranks(run_cases, RANKS, resume, cases, timeout_s=240):
        for case, (straight, resumed) in zip(cases, results, strict=True):
            assert straight[2] == resumed[2] == 9, case
            assert straight[1].keys() == resumed[1].keys(), case
            assert any(error.any() for error in straight[1].values()), case
            for name, error in straight[1].items():
                assert torch.equal(error, resumed[1][name]), f"{case}, {name}"
            for one, other in zip(straight[0], resumed[0], strict=True):
                assert torch.equal(one, other), case


def save_run(rank, folder, form):
    run = Run(form, seed=0)
    compress_reduce_scatter(run.model, run.state)
    run.train(rank, range(5))
    run.save(folder)
    return mean_errors(run.state), consolidated_state_dict(run.state)


def load_run(rank, folder, form):
    """Load on another number of ranks. Returns the mean errors before and after two steps that sum zeros."""
    run = Run(form, seed=1)
    compress_reduce_scatter(run.model, run.state)
    run.load(folder)
    load_from_dcp(run.state, folder, "codes")
    loaded = mean_errors(run.state)
    received = {name: torch.zeros(each.shape) for name, each in run.model.named_parameters()}
    for _ in range(2):
        run.model.zero_grad()
        (0.0 * run.model(batch_of(rank, 0), use_spare=True).sum()).backward()
        for name, each in run.model.named_parameters():
            received[name] += each.grad.full_tensor()
    return loaded, received, mean_errors(run.state)


@pytest.mark.parametrize(("form", "numbers"), mixed(["4 bits", "hierarchical"], [(RANKS, 2), (2, RANKS)]))
def test_another_number_of_shards_keeps_the_mean_error(run_ranks, tmp_path, form, numbers):
    saved_by, loaded_by = numbers
    folder, before_form, after_form = str(tmp_path), form, form
    if form == "hierarchical":
        before_form, after_form = (form, "4 bits") if saved_by == RANKS else ("4 bits", form)
    saved = run_ranks(save_run, saved_by, folder, before_form)
    for (mean, consolidated), (loaded, received, left) in zip(
        saved[:2], run_ranks(load_run, loaded_by, folder, after_form)[:2], strict=True
    ):
        assert any(error.any() for error in mean.values())
        assert set(consolidated["parameters"]) == set(mean)
        for name, error in mean.items():
            assert (loaded[name] - error).abs().max() <= 1e-6 * error.abs().max(), name
            # Whatever the steps bring is what the mean error lacks afterwards.
            found = received[name] + left[name]
            assert (found - error).abs().max() <= 1e-5 * error.abs().max(), name
        assert any(each.any() for each in received.values())


def from_ddp(rank):
    """Train with DDP, then load its state for an FSDP2 model. Returns the mean errors before and after."""
    torch.manual_seed(0)
    module = Net()
    ddp, state = DistributedDataParallel(module, find_unused_parameters=True), state_of("4 bits")
    state.number_parameters(module.named_parameters())
    ddp.register_comm_hook(state, quantization_hook)
    for number in range(3):
        ddp(batch_of(rank, number), use_spare=True).square().mean().backward()
    run = Run("4 bits", seed=0)
    compress_reduce_scatter(run.model, run.state)
    run.state.load_state_dict(consolidated_state_dict(state))
    before = mean_errors(run.state)
    run.train(rank, range(1))
    return mean_errors(state), before, by_parameter(run.state)


def test_errors_of_ddp_go_on_in_fsdp2(run_ranks):
    for of_ddp, loaded, later in run_ranks(from_ddp, 2):
        assert any(error.any() for error in of_ddp.values())
        assert of_ddp.keys() == loaded.keys() == later.keys()
        for name, error in of_ddp.items():
            assert (loaded[name] - error).abs().max() <= 1e-6 * error.abs().max(), name
            assert torch.equal(later[name], loaded[name]) != error.any(), name


def by_columns(parameter):
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def save_columns(rank, folder):
    torch.manual_seed(0)
    state = state_of("4 bits")
    model = sharded(all_shards(), shard_placement_fn=by_columns)
    compress_reduce_scatter(model, state)
    model(batch_of(rank, 0)).square().mean().backward()
    dcp.save({"codes": per_rank_state_dict(state)}, checkpoint_id=folder)
    return by_parameter(state)


def load_columns(rank, folder):
    """Load on another number of ranks. Returns the warnings of errors that start at zero."""
    state = state_of("4 bits")
    model = sharded(all_shards(), shard_placement_fn=by_columns)
    compress_reduce_scatter(model, state)
    load_from_dcp(state, folder, "codes")
    with Messages("gradcomp.hooks.quantization_hooks") as lines:
        model(batch_of(rank, 0)).square().mean().backward()
    return [line for line in lines if "start at zero" in line]


@pytest.mark.parametrize(("loaded_by", "num_warnings"), [(RANKS, 0), (2, 1)])
def test_other_shards_of_columns_start_at_zero(run_ranks, tmp_path, loaded_by, num_warnings):
    saved = run_ranks(save_columns, RANKS, str(tmp_path))
    assert saved[0]["embed.weight"].any()
    for lines in run_ranks(load_columns, loaded_by, str(tmp_path)):
        assert len(lines) == num_warnings, lines
