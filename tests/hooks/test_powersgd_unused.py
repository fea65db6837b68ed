"""Test that PowerSGD loses no error of a layer that steps leave out, or of models that share a state."""

from functools import partial
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.hooks import powerSGD_hook
from gradcomp.hooks.default_hooks import fp16_compress_wrapper
from tests.hooks.powersgd_runs import Messages
from tests.kept import entry_of

HOOKS = {"powerSGD": powerSGD_hook.powerSGD_hook, "batched": powerSGD_hook.batched_powerSGD_hook}
SIZE, START, STEPS = 24, 2, 60


class Layers(nn.Module):
    """This model has three layers. It uses the second one in every `every`-th step only."""

    def __init__(self, every):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.every = every

    def forward(self, x, step):
        x = self.layers[0](x)
        if step % self.every == 0:
            x = x + self.layers[1](x)
        return self.layers[2](x)


def record(kept, gradient):
    kept.copy_(gradient)


def sums(rank, library, hook, every, set_to_none, as_view):
    """Train; return Σ gradients, Σ outputs and this rank's errors, each for layer 1 and layer 0."""
    model = Layers(every)
    state = powerSGD_hook.PowerSGDState(None, 1, START, min_compression_rate=1.5)
    ddp = {"gradcomp": gradcomp.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}[
        library
    ](model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(state, HOOKS[hook])
    weights = [model.layers[1].weight, model.layers[0].weight]
    local = [torch.zeros(SIZE, SIZE) for _ in weights]  # this step's gradients
    for weight, kept in zip(weights, local, strict=True):
        weight.register_hook(partial(record, kept))
    given, out = torch.zeros(2, SIZE, SIZE), torch.zeros(2, SIZE, SIZE)
    for step in range(START + STEPS):
        ddp.zero_grad(set_to_none=set_to_none)
        for each in local:
            each.zero_()
        ddp(
            torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 * rank + step)), step
        ).square().mean().backward()
        if step >= START:
            given += torch.stack(local)
            out += torch.stack([torch.zeros(SIZE, SIZE) if w.grad is None else w.grad for w in weights])
    errors = [entry_of(state, weight)["error"] for weight in weights]
    return given, out, torch.stack(errors)


def lost(ranks):
    """Return ‖in − out − mean error‖ / ‖in‖ of each layer or model."""
    given, out, owed = (torch.stack(each).double().mean(0) for each in zip(*ranks, strict=True))
    missing = (given - out - owed).flatten(1).norm(dim=1) / given.flatten(1).norm(dim=1)
    assert owed.flatten(1).norm(dim=1).min() > 0.01 * given[0].norm()
    return missing.tolist()


@pytest.mark.parametrize(
    ("hook", "every", "set_to_none", "as_view"),
    [
        ("powerSGD", 2, True, False),
        ("powerSGD", 4, True, True),
        ("powerSGD", 4, False, False),
        ("powerSGD", 2, False, True),
        ("batched", 4, True, False),
    ],
)
def test_nothing_is_lost_of_a_layer_that_all_ranks_skip(run_ranks, hook, every, set_to_none, as_view):
    assert max(lost(run_ranks(sums, 2, "gradcomp", hook, every, set_to_none, as_view))) <= 1e-5


def said_by_the_batched_hook(rank, library, every):
    with Messages() as said:
        given, out, errors = sums(rank, library, "batched", every, True, False)
    return [line for line in said if "drops the averages" in line], (given, out, errors)


@pytest.mark.parametrize(("library", "every", "num"), [("torch", 4, 1), ("torch", 1, 0), ("gradcomp", 4, 0)])
def test_the_batched_hook_says_once_that_torchs_ddp_loses(run_ranks, library, every, num):
    ranks = run_ranks(said_by_the_batched_hook, 2, library, every)
    assert [len(said) for said, _ in ranks] == [num, num]
    assert (lost([each for _, each in ranks])[0] > 0.01) == bool(num)


@pytest.mark.parametrize("every", [2, 4])
def test_torchs_ddp_loses_nothing_where_gradients_are_none(run_ranks, every):
    assert max(lost(run_ranks(sums, 2, "torch", "powerSGD", every, True, False))) <= 1e-5


def test_what_torchs_ddp_loses_where_gradients_are_zeros(run_ranks):
    """A hook cannot tell zeros from a used layer's gradients; see docs/powersgd.md for the loss."""
    skipped, used = lost(run_ranks(sums, 2, "torch", "powerSGD", 4, False, False))
    assert skipped > 0.1
    assert used <= 1e-5


def two_models(rank, is_wrapped):
    """Train two models in turn with one state; return Σ gradients, Σ outputs and errors, by model."""
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
    return given, out, torch.stack(errors).view(2, SIZE, SIZE)


@pytest.mark.parametrize(("is_wrapped", "bound"), [(False, 1e-5), (True, 1e-2)])
def test_two_models_with_one_state_have_errors_of_their_own(run_ranks, is_wrapped, bound):
    assert max(lost(run_ranks(two_models, 2, is_wrapped))) <= bound


class Mixed(nn.Module):
    """This model's gradients are its inputs. PowerSGD sends the second gradient exactly."""

    def __init__(self):
        super().__init__()
        self.matrix, self.narrow = nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(64, 2))

    def forward(self, matrix, narrow):
        return (self.matrix * matrix).sum() + (0 if narrow is None else (self.narrow * narrow).sum())


def owed_by_the_start(rank, skips):
    """Return (‖Σ mean gradients − Σ averages − mean error‖, ‖error after the start‖) of the narrow layer.

    skips: for each rank, the PowerSGD steps that leave the layer out, counted from the first one.
    """
    libraries = (gradcomp.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    cases = product(libraries, (None, torch.int8))
    return [owed_with(rank, library, factor_dtype, skips) for library, factor_dtype in cases]


def owed_with(rank, library, factor_dtype, skips):
    model = Mixed()
    ddp = library(model, find_unused_parameters=True)
    state = powerSGD_hook.PowerSGDState(
        None, 2, start_powerSGD_iter=START + 1, start_bits=4, factor_dtype=factor_dtype
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def error():
        return entry_of(state, model.narrow)["error"].double()

    missing, debt = torch.zeros(64, 2, dtype=torch.float64), None
    for step in range(START + 8):
        generator = torch.Generator().manual_seed(10 * step + rank)
        matrix, narrow = torch.randn(40, 40, generator=generator), torch.randn(64, 2, generator=generator)
        if step == START + 1:
            debt = error()
        is_used = step - START - 1 not in skips[rank]
        ddp.zero_grad()
        ddp(matrix, narrow if is_used else None).backward()
        missing += (narrow.double() if is_used else 0) / 2
        missing -= (0 if model.narrow.grad is None else model.narrow.grad.double()) / 2
    missing -= error() / 2
    dist.all_reduce(missing)
    return float(missing.norm()), float(debt.norm())


@pytest.mark.parametrize("skips", [((0,), (0,)), ((0, 1), (0,)), ((), (0, 1))], ids=str)
def test_a_quantized_starts_debt_waits_for_a_layer_that_steps_leave_out(run_ranks, skips):
    for missing, debt in chain(*run_ranks(owed_by_the_start, 2, skips)):
        assert debt > 0.1
        assert missing < 1e-5
