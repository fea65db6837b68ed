"""Compare gradcomp.DistributedDataParallel with torch's: hooks, and optimizers within backward."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradcomp
from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.parallel.beside_torch import assert_all_alike, assert_scenarios_alike, batch_of, flat, train
from tests.reducer.models import MLP, loss_of


def refuse_hooks(cls, rank):
    messages = []

    def wrong_bucket(state, bucket: int):
        pass

    def wrong_return(state, bucket) -> int:
        pass

    def other_name(state, buckets):
        pass

    for hook in ("text", wrong_bucket, wrong_return, other_name):
        ddp = cls(MLP())
        with pytest.raises((TypeError, ValueError, KeyError)) as caught:
            ddp.register_comm_hook(None, hook)
        messages.append((type(caught.value).__name__, str(caught.value)))
    ddp = cls(MLP())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return messages


def hooks_of_torchs():
    """Return name -> (state, hook). Each subgroup of post-localSGD has one rank."""
    subgroup, _ = dist.new_subgroups(group_size=1)
    local = torch_post_local_sgd.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    power = partial(torch_powersgd.PowerSGDState, None, matrix_approximation_rank=2)
    return {
        "allreduce": (None, torch_default.allreduce_hook),
        "fp16": (None, torch_default.fp16_compress_hook),
        "fp16 allreduce": (None, torch_default.fp16_compress_wrapper(torch_default.allreduce_hook)),
        "noop": (None, torch_debugging.noop_hook),
        "post-localSGD": (local, torch_post_local_sgd.post_localSGD_hook),
        "powerSGD": (power(start_powerSGD_iter=2), torch_powersgd.powerSGD_hook),
        "powerSGD, not yet": (power(start_powerSGD_iter=100), torch_powersgd.batched_powerSGD_hook),
    }


def train_with(cls, rank, name):
    """Train with one bucket, which both wrappers fill in the same order."""
    return train(cls, rank, "MLP", {"bucket_cap_mb": 25}, hooks_of_torchs()[name])[0]


def train_complex(cls, rank, name):
    """Return the averages of a model with complex parameters; hooks see their gradients as real ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, dtype=torch.complex64)
    ddp = cls(model)
    hook = {
        "powerSGD": (powerSGD_hook.PowerSGDState(None, 4, 2, 0.1), powerSGD_hook.powerSGD_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "torch's allreduce": (None, torch_default.allreduce_hook),
        "torch's fp16": (None, torch_default.fp16_compress_hook),
    }.get(name)
    if name == "powerSGD":  # random directions depend on names
        hook[0].number_parameters(model.named_parameters())
    if hook is not None:
        ddp.register_comm_hook(*hook)
    generator = torch.Generator().manual_seed(rank)
    averages = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(3, 6, dtype=torch.complex64, generator=generator)).abs().sum().backward()
        averages.append(torch.view_as_real(model.weight.grad.clone()))
    return torch.stack(averages)


def test_hooks_average_complex_gradients(run_ranks):
    names = ["none", "powerSGD", "fp16", "torch's allreduce", "torch's fp16"]
    cases = assert_all_alike(run_ranks, train_complex, 2, [(name,) for name in names])
    plain, full_rank = cases[0][0], cases[1][0]
    assert (full_rank - plain).abs().max() <= 1e-5 * plain.abs().max()
    for averages in cases:
        assert torch.equal(averages[0], averages[1])
        assert (averages[0] - plain).abs().max() <= 2e-3 * plain.abs().max()


def test_torchs_hooks_have_the_same_result(run_ranks):
    names = ("allreduce", "fp16", "fp16 allreduce", "noop", "post-localSGD", "powerSGD", "powerSGD, not yet")
    assert_all_alike(run_ranks, train_with, 2, [(name,) for name in names])


def optimizers_in_backward(rank, inside):
    """Train with optimizers that step in backward (torch's DDP needs an accelerator for it), or later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit warns on import
        from torch.distributed.optim import _apply_optimizer_in_backward
    torch.manual_seed(0)
    model = MLP()
    if inside:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = gradcomp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(ddp(batch_of(model, rank, step))).backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def test_optimizers_in_backward(run_ranks):
    """The optimizers step after their parameters' gradients have been averaged."""
    first, second = run_ranks(optimizers_in_backward, 2, True)
    assert torch.equal(first, second)
    assert torch.equal(first, run_ranks(optimizers_in_backward, 2, False)[0])


def test_one_rank_as_torchs(run_ranks):
    assert_scenarios_alike(run_ranks, 1, refuse_hooks)
