"""Test CommHook: a hook and its state for models that frameworks wrap."""

from itertools import product

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
from tests.kept import error_in
from tests.ranks import of_all_ranks


class Wrapped(nn.Module):
    """Another module around a model, like the modules of frameworks."""

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, gradcomp.DistributedDataParallel])
def test_the_ddp_inside_of_other_modules_is_found(rank, wrapper):
    state = QuantizationState(bits=4)
    comm_hook = CommHook(state, quantization_hook)
    model = Wrapped(Wrapped(model_of(wrapper)))
    comm_hook.register(model)
    comm_hook.register(model)  # frameworks may register twice
    step(model, rank)
    assert state.iter == 1


@pytest.mark.ranks(2)
def test_models_without_and_with_several_ddp(rank):
    comm_hook = CommHook(None, bf16_compress_hook)
    without = "^Linear contains no DistributedDataParallel, but a hook is registered.* There are 2 ranks"
    for model, message in (
        (nn.Linear(2, 2), without),
        (Wrapped(model_of(), model_of()), "^Wrapped contains 2 DistributedDataParallel"),
    ):
        with pytest.raises(ValueError, match=message):
            comm_hook.register(model)
    model = model_of()
    comm_hook.register(model)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        CommHook(None, bf16_compress_hook).register(model)


def test_one_process_needs_no_ddp():
    CommHook(None, bf16_compress_hook).register(nn.Linear(2, 2))


@pytest.mark.ranks(2)
def test_the_state_is_saved_once_for_all_ranks_and_restored(rank):
    """Average four steps, save, and resume in a new model."""
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
    error = error_in(saved)
    assert error.any()
    assert torch.equal(*of_all_ranks(error))
    # Every rank has loaded the mean of the ranks' errors, so the mean over ranks is unchanged.
    torch.testing.assert_close(step(new_model, rank, 4), step(model, rank, 4), rtol=1e-4, atol=1e-4)


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


HOOKS = {
    "int4": (lambda: QuantizationState(bits=4, block_size=16), quantization_hook),
    "PowerSGD": (lambda: PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook),
    "quantized start": (lambda: PowerSGDState(None, 1, start_powerSGD_iter=3, start_bits=4), powerSGD_hook),
}
SIZE = 32


class Run:
    """Training with a scaler that doubles its scale in every update.

    optimizers: the names of the parameters that each optimizer has.
    scale: the program sets this scale after every update.
    owed: sum over the steps of weight's mean gradient minus its average, without the scale.
    """

    def __init__(self, rank, name, optimizers=(("weight", "bias"),), scale=None, num_backwards=1):
        make, hook = HOOKS[name]
        self.rank, self.comm_hook = rank, CommHook(make(), hook)
        self.module = nn.Linear(SIZE, SIZE)
        self.model = DistributedDataParallel(self.module)
        self.comm_hook.register(self.model)
        groups = ([getattr(self.module, each) for each in names] for names in optimizers)
        self.optimizers = [torch.optim.SGD(group, lr=0.0) for group in groups]
        self.scale, self.num_backwards = scale, num_backwards
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
        self.owed = torch.zeros(SIZE, SIZE, dtype=torch.float64)

    def step(self, seed, overflows=False):
        """Take a step with different random gradients on every rank; bias's may overflow on the last rank."""
        seeds = [100 * seed + rank for rank in range(2)]
        gradients = [torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(each)) for each in seeds]
        self.model.zero_grad()
        for _ in range(self.num_backwards):
            loss = (self.model(torch.eye(SIZE)) * gradients[self.rank].t()).sum()
            if overflows and self.rank == 1:
                loss = loss + torch.inf * self.module.bias[0]
            self.scaler.scale(loss).backward()
        if not overflows or len(self.optimizers) > 1:  # weight's own optimizer steps
            average = self.module.weight.grad.double() / self.scaler.get_scale()
            self.owed += sum(gradients).double() / 2 - average
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.scale is not None:
            self.scaler.update(self.scale)

    def lost(self):
        """Return the norm of the gradients missing in averages and errors, relative to a step's gradient."""
        self.comm_hook.follow(self.scaler)
        error = self.comm_hook.state_dict()["parameters"]["weight"]["error"].double()
        return ((self.owed - error / self.scaler.get_scale()).norm() / SIZE).item()


# (Run's options, the steps that the scaler skips)
OPTIONS = [
    ({}, 3),
    ({"scale": 2.0**16}, 3),  # which never falls
    ({"optimizers": (("weight",), ("bias",))}, 0),  # one of which steps
    ({"optimizers": (("bias",), ("weight",))}, 0),
    ({"num_backwards": 2}, 3),  # without no_sync: of those the last comes back
]


@pytest.mark.ranks(2)
def test_errors_follow_a_scaler_and_the_steps_that_it_skips(rank):
    for name, (options, num_skipped) in product(HOOKS, OPTIONS):
        run, num_backwards = Run(rank, name, **options), options.get("num_backwards", 1)
        for seed in range(8):
            run.comm_hook.follow(run.scaler)
            run.step(seed, overflows=seed in (4, 6, 7))
            run.comm_hook.state_dict()  # a save takes the step back, but once
        assert run.lost() < 1e-5 or num_backwards > 1, (name, options)
        assert run.comm_hook.state.iter == 8 * num_backwards - num_skipped, (name, options)


@pytest.mark.ranks(2)
def test_errors_follow_the_scaler_of_a_resumed_run(rank):
    """Resume with the checkpoint's scaler, or a new scaler with another scale, or no scaler."""
    for name, scale in product(HOOKS, ["of the checkpoint", "new", None]):
        first, second = Run(rank, name), Run(rank, name)
        for seed in range(4):
            first.comm_hook.follow(first.scaler)
            first.step(seed, overflows=seed == 3)
        # The state is saved after the scaler's update, before the next call of follow.
        second.comm_hook.load_state_dict(first.comm_hook.state_dict())
        second.owed = first.owed
        if scale == "of the checkpoint":
            second.scaler.load_state_dict(first.scaler.state_dict())
        elif scale is None:
            second.scaler = torch.amp.GradScaler("cpu", enabled=False)
        for seed in range(4, 7):
            second.comm_hook.follow(second.scaler if scale else None)
            second.step(seed)
        assert second.lost() < 1e-5, (name, scale)


@pytest.mark.ranks(2)
def test_a_first_call_after_a_step_is_an_error(rank):
    run = Run(rank, "int4")
    run.step(0)
    with pytest.raises(RuntimeError, match=r"for the first time after 1 steps, so .* unknown\. Likely cause"):
        run.comm_hook.follow(run.scaler)
    run.comm_hook.follow(None)  # nothing to follow: gradients have no scale


def test_states_without_errors_follow_nothing():
    CommHook(None, bf16_compress_hook).follow(torch.amp.GradScaler("cpu"))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "2"])
def test_a_scale_that_is_none_is_refused(scale):
    comm_hook = CommHook(QuantizationState(), quantization_hook)
    with pytest.raises(ValueError, match=r"gradient_scale is .*, but must be finite and positive"):
        comm_hook.load_state_dict(comm_hook.state_dict() | {"gradient_scale": scale})


def test_a_hook_in_the_place_of_the_state():
    with pytest.raises(TypeError, match=r"CommHook got an object .* swapped"):
        CommHook(quantization_hook, QuantizationState())
