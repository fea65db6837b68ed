"""A hook and its state for models that frameworks wrap."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.frameworks import CommHook
from gradcomp.hooks.default_hooks import bf16_compress_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.distributed.ranks import run_ranks


class Wrapped(nn.Module):
    """What frameworks do to a model: another module around it."""

    def __init__(self, *modules):
        super().__init__()
        self.modules_inside = nn.ModuleList(modules)

    def forward(self, x):
        return self.modules_inside[0](x)


def model_of(wrapper=DistributedDataParallel):
    torch.manual_seed(0)
    return wrapper(nn.Linear(32, 16))


def step(model, rank, seed=0):
    model.zero_grad()
    model(
        torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * seed + rank))
    ).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def registered_inside(rank, wrapper):
    state = QuantizationState(bits=4)
    comm_hook = CommHook(state, quantization_hook)
    model = Wrapped(Wrapped(model_of(wrapper)))
    comm_hook.register(model)
    comm_hook.register(model)  # frameworks may come twice
    step(model, rank)
    return state.iter


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, gradcomp.DistributedDataParallel])
def test_the_ddp_inside_of_other_modules_is_found(wrapper):
    assert run_ranks(registered_inside, 2, wrapper) == [1, 1]


def misfits(rank):
    comm_hook = CommHook(None, bf16_compress_hook)
    messages = []
    for model in (nn.Linear(2, 2), Wrapped(model_of(), model_of())):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            comm_hook.register(model)
        messages.append(str(raised.value))
    model = model_of()
    CommHook(None, bf16_compress_hook).register(model)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        CommHook(None, bf16_compress_hook).register(model)
    return messages


def test_models_without_and_with_several_ddp():
    for without, several in run_ranks(misfits, 2):
        assert without.startswith("Linear contains no DistributedDataParallel, but a hook is registered")
        assert "There are 2 ranks" in without
        assert several.startswith("Wrapped contains 2 DistributedDataParallel")


def test_one_process_needs_no_ddp():
    CommHook(None, bf16_compress_hook).register(nn.Linear(2, 2))


def resumed(rank):
    """Average four steps, save, go on, and resume in a new model; return both's next averages."""
    first, second = (
        CommHook(PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook)
        for _ in range(2)
    )
    model, new_model = model_of(), model_of()
    first.register(model)
    for seed in range(4):
        step(model, rank, seed)
    saved = first.state_dict()
    second.register(new_model)
    second.load_state_dict(saved)
    return saved, step(model, rank, 4), step(new_model, rank, 4)


def test_the_state_is_saved_once_for_all_ranks_and_restored():
    (saved, whole, again), (other, *_) = run_ranks(resumed, 2)
    error = saved["buckets"][0]["error"]
    assert error.any()
    assert torch.equal(error, other["buckets"][0]["error"])
    # Every rank has the mean of the errors, whose mean is the same.
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)


def test_without_a_group_or_memory_nothing_is_saved():
    assert CommHook(QuantizationState(), quantization_hook).state_dict() == {}
    CommHook(QuantizationState(), quantization_hook).load_state_dict({})


@pytest.mark.usefixtures("group_of_one")
def test_states_without_memory():
    comm_hook = CommHook(dist.group.WORLD, bf16_compress_hook)
    assert comm_hook.state_dict() == {}
    comm_hook.load_state_dict({})
    with pytest.raises(ValueError, match=r"the checkpoint has a compressing hook's state \(version"):
        comm_hook.load_state_dict({"version": 1})


def test_the_errors_follow_a_scaler():
    class Scaler:
        scale = 8.0

        def get_scale(self):
            return self.scale

    factors = []
    state = QuantizationState()
    state.rescale_errors = factors.append
    comm_hook, scaler = CommHook(state, quantization_hook), Scaler()
    comm_hook.follow(None)
    for scale in (8.0, 8.0, 4.0, 16.0):
        scaler.scale = scale
        comm_hook.follow(scaler)
    assert factors == [1.0, 0.5, 4.0]
    CommHook(None, bf16_compress_hook).follow(scaler)


def test_a_hook_in_the_place_of_the_state():
    with pytest.raises(TypeError, match="its hook is <gradcomp"):
        CommHook(quantization_hook, QuantizationState())
