"""Compare gradcomp.DistributedDataParallel with torch's: hooks, and optimizers within backward."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradcomp
from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.parallel.beside_torch import assert_alike, batch_of, flat, train
from tests.ranks import of_all_ranks
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


def post_local_sgd():
    """Return the state and hook. Each subgroup has one rank."""
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = torch_post_local_sgd.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    return state, torch_post_local_sgd.post_localSGD_hook


HOOKS_OF_TORCHS = {
    "allreduce": lambda: (None, torch_default.allreduce_hook),
    "fp16": lambda: (None, torch_default.fp16_compress_hook),
    "fp16 allreduce": lambda: (None, torch_default.fp16_compress_wrapper(torch_default.allreduce_hook)),
    "noop": lambda: (None, torch_debugging.noop_hook),
    "post-localSGD": post_local_sgd,
    "powerSGD": lambda: (torch_powersgd.PowerSGDState(None, 2, 2), torch_powersgd.powerSGD_hook),
    "not yet": lambda: (torch_powersgd.PowerSGDState(None, 2, 100), torch_powersgd.batched_powerSGD_hook),
}


def train_with(cls, rank, name):
    """Train with one bucket, which both wrappers fill in the same order."""
    return train(cls, rank, "MLP", {"bucket_cap_mb": 25}, HOOKS_OF_TORCHS[name]())[0]


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


@pytest.mark.ranks(2)
def test_hooks_average_complex_gradients(rank):
    names = ["none", "powerSGD", "fp16", "torch's allreduce", "torch's fp16"]
    plain, full_rank, *others = (assert_alike(rank, train_complex, name) for name in names)
    assert (full_rank - plain).abs().max() <= 1e-5 * plain.abs().max()
    for averages in (full_rank, *others):
        assert torch.equal(*of_all_ranks(averages))
        assert (averages - plain).abs().max() <= 2e-3 * plain.abs().max()


@pytest.mark.ranks(2)
def test_torchs_hooks_have_the_same_result(rank):
    for name in HOOKS_OF_TORCHS:
        assert_alike(rank, train_with, name)


@pytest.mark.ranks(2)
def test_optimizers_in_backward(rank):
    """Optimizers step once their gradients are averaged. torch's DDP needs an accelerator for this."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    found = []
    for inside in (True, False):
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
        found.append(flat(model))
    assert torch.equal(*found)
    assert torch.equal(*of_all_ranks(found[0]))
    output = ddp(batch_of(model, rank, 0))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="changed, or without a gradient"):
        loss_of(output).backward()
    ddp(batch_of(model, rank, 0))  # takes the optimizers over; then they are detached again
    for param in model.parameters():
        del param._in_backward_optimizers
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    assert all(param.grad is not None for param in model.parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    gradcomp.DistributedDataParallel(model)  # whose forward has not run: the model is used by itself
    loss_of(model(batch_of(model, rank, 0))).backward()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.ranks(1)
def test_refused_hooks(rank):
    assert_alike(rank, refuse_hooks)
