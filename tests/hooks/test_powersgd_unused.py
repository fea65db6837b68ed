"""Test that PowerSGD loses no error of a layer that steps leave out, or of models that share a state."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks import powerSGD_hook
from gradcomp.hooks.default_hooks import fp16_compress_wrapper
from tests.depth import mixed
from tests.hooks.powersgd_runs import Messages
from tests.kept import entry_of
from tests.ranks import of_all_ranks
from tests.training import Averaged, Given, Layers, drawn, power_sgd

HOOKS = {"powerSGD": powerSGD_hook.powerSGD_hook, "batched": powerSGD_hook.batched_powerSGD_hook}
SIZE, START, STEPS = 24, 2, 24


def record(kept, gradient):
    kept.copy_(gradient)


def sums(rank, library, hook, every, set_to_none, as_view):
    """Train three layers; every `every`-th step uses the second one.

    Returns Σ gradients, Σ outputs and this rank's errors, each for layer 1 and layer 0.
    """
    torch.manual_seed(0)
    state, model = power_sgd(rank=1, start=START, min_compression_rate=1.5), Layers(*[SIZE] * 4)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
    ddp = Averaged(model, library, HOOKS[hook], state, **options)
    weights = [model.layers[1].weight, model.layers[0].weight]
    local = torch.zeros(2, SIZE, SIZE)  # this step's gradients
    for weight, kept in zip(weights, local, strict=True):
        weight.register_hook(partial(record, kept))
    given, out = torch.zeros(2, SIZE, SIZE), torch.zeros(2, SIZE, SIZE)
    for step in range(START + STEPS):
        model.zero_grad(set_to_none=set_to_none)
        local.zero_()
        if step == START + 5:  # the new compressor's first step leaves the layer out
            state.matrix_approximation_rank = 2
        ddp(drawn(4, SIZE, rank=rank, step=step), (1,) if step % every else ()).square().mean().backward()
        if step >= START:
            given += local
            out += torch.stack([torch.zeros(SIZE, SIZE) if w.grad is None else w.grad for w in weights])
    return given, out, torch.stack([entry_of(state, weight)["error"] for weight in weights])


def lost(ranks):
    """Return ‖in − out − mean error‖ / ‖in‖ of each layer or model."""
    given, out, owed = (torch.stack(each).double().mean(0) for each in zip(*ranks, strict=True))
    missing = (given - out - owed).flatten(1).norm(dim=1) / given.flatten(1).norm(dim=1)
    assert owed.flatten(1).norm(dim=1).min() > 0.01 * given[0].norm()
    return missing.tolist()


@pytest.mark.parametrize(
    ("hook", "every", "set_to_none", "as_view"),
    [("powerSGD", 2, True, False), ("powerSGD", 4, False, True), ("batched", 4, True, False)],
)
def test_nothing_is_lost_of_a_layer_that_all_ranks_skip(run_ranks, hook, every, set_to_none, as_view):
    assert max(lost(run_ranks(sums, 2, "gradcomp", hook, every, set_to_none, as_view))) <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("library", "every", "num"), [("torch", 4, 1), ("torch", 1, 0), ("gradcomp", 4, 0)])
def test_the_batched_hook_says_once_that_torchs_ddp_loses(rank, library, every, num):
    with Messages() as said:
        given, out, errors = sums(rank, library, "batched", every, True, False)
    ranks = of_all_ranks(([line for line in said if "drops the averages" in line], (given, out, errors)))
    assert [len(said) for said, _ in ranks] == [num, num]
    assert (lost([each for _, each in ranks])[0] > 0.01) == bool(num)


def test_torchs_ddp_loses_nothing_where_gradients_are_none(run_ranks):
    assert max(lost(run_ranks(sums, 2, "torch", "powerSGD", 4, True, False))) <= 1e-5


def test_what_torchs_ddp_loses_where_gradients_are_zeros(run_ranks):
    """A hook cannot tell zeros from a used layer's gradients; see docs/powersgd.md for the loss."""
    skipped, used = lost(run_ranks(sums, 2, "torch", "powerSGD", 4, False, False))
    assert skipped > 0.1
    assert used <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("is_wrapped", "bound"), [(False, 1e-5), (True, 1e-2)])
def test_two_models_with_one_state_have_errors_of_their_own(rank, is_wrapped, bound):
    """Train two models in turn with one state."""
    state = powerSGD_hook.PowerSGDState(None, 1, 4, min_compression_rate=1.5)
    models = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(2)]
    ddps = [nn.parallel.DistributedDataParallel(model) for model in models]
    given, out = torch.zeros(2, SIZE, SIZE), torch.zeros(2, SIZE, SIZE)
    hook = powerSGD_hook.powerSGD_hook
    for ddp in ddps:
        ddp.register_comm_hook(state, fp16_compress_wrapper(hook) if is_wrapped else hook)
    for step in range(20):
        for i, (model, ddp) in enumerate(zip(models, ddps, strict=True)):
            x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1000 * i + 100 * rank + step))
            ddp.zero_grad()
            (ddp(x) * x.flip(0)).sum().backward()
            if step >= 2:
                given[i] += x.flip(0).mT @ x
                out[i] += model.weight.grad
    errors = [entry_of(state, model.weight)["error"] for model in models]
    assert max(lost(of_all_ranks((given, out, torch.stack(errors).view(2, SIZE, SIZE))))) <= bound


def owed_with(rank, library, factor_dtype, skips):
    model = Given((40, 40), (64, 2))  # PowerSGD sends the second gradient exactly
    ddp = library(model, find_unused_parameters=True)
    state = powerSGD_hook.PowerSGDState(
        None, 2, start_powerSGD_iter=START + 1, start_bits=4, factor_dtype=factor_dtype
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def error():
        return entry_of(state, model.weights[1])["error"].double()

    missing, debt = torch.zeros(64, 2, dtype=torch.float64), None
    for step in range(START + 8):
        generator = torch.Generator().manual_seed(10 * step + rank)
        matrix, narrow = torch.randn(40, 40, generator=generator), torch.randn(64, 2, generator=generator)
        if step == START + 1:
            debt = error()
        is_used = step - START - 1 not in skips[rank]
        ddp.zero_grad()
        ddp([matrix, narrow if is_used else None]).backward()
        missing += (narrow.double() if is_used else 0) / 2
        missing -= (0 if model.weights[1].grad is None else model.weights[1].grad.double()) / 2
    missing -= error() / 2
    dist.all_reduce(missing)
    return float(missing.norm()), float(debt.norm())


@pytest.mark.ranks(2)
def test_a_quantized_starts_debt_waits_for_a_layer_that_steps_leave_out(rank):
    libraries = (gradcomp.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    skipped = (((0,), (0,)), ((0, 1), (0,)), ((), (0, 1)))
    for library, factor_dtype, skips in mixed(libraries, (None, torch.int8), skipped, together=2):
        missing, debt = owed_with(rank, library, factor_dtype, skips)
        assert debt > 0.1
        assert missing < 1e-5
