"""The hooks' names, signatures and errors. A user who changes one import relies on them."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks as torch_hooks

from gradcomp import hooks
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import (
    DDPCommHookType,
    auto_hook,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)

TORCH_NAMES = {"default_hooks": "default", "debugging_hooks": "debugging", "powerSGD_hook": "powerSGD"}
MODULES = ["default_hooks", "debugging_hooks", "powerSGD_hook"]
QUANTIZATION = [
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
]
HOOKS = [
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
    *QUANTIZATION,
    quantization_hooks.quantization_hook,
    default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook),
    default_hooks.bf16_compress_wrapper(debugging_hooks.noop_hook),
]


@pytest.mark.parametrize("name", MODULES)
def test_modules_mirror_torch(name):
    ours = getattr(hooks, name)
    theirs = getattr(torch_hooks, TORCH_NAMES[name])
    assert set(theirs.__all__) <= set(ours.__all__)
    for function in theirs.__all__:
        parameters = list(inspect.signature(getattr(theirs, function)).parameters)
        own = inspect.signature(getattr(ours, function)).parameters
        assert list(own)[: len(parameters)] == parameters
        assert all(
            own[added].kind is inspect.Parameter.KEYWORD_ONLY for added in list(own)[len(parameters) :]
        )


@pytest.mark.parametrize("hook", QUANTIZATION, ids=lambda hook: hook.__qualname__)
def test_quantization_hooks_have_torchs_signatures(hook):
    """This test has a list of hooks, since torch's module has no __all__."""
    theirs = inspect.signature(getattr(torch_hooks.quantization, hook.__name__)).parameters
    assert {name: each.default for name, each in inspect.signature(hook).parameters.items()} == {
        name: each.default for name, each in theirs.items()
    }


@pytest.mark.parametrize("bucket_size", [0, 7, -2, 4098, True, 512.0, None])
def test_a_bad_bucket_size_is_shown(bucket_size):
    bucket = GradBucket(0, torch.zeros(6), [torch.zeros(6)], True)
    with pytest.raises(ValueError, match=f"quantization_perchannel_hook: bucket_size is {bucket_size}"):
        quantization_hooks.quantization_perchannel_hook(None, bucket, bucket_size)


@pytest.mark.parametrize("hook", QUANTIZATION, ids=lambda hook: hook.__qualname__)
def test_quantization_hooks_refuse_integers(hook, group_of_one):
    bucket = GradBucket(0, torch.zeros(6, dtype=torch.int64), [torch.zeros(6)], True)
    with pytest.raises(TypeError, match=f"{hook.__name__} compresses floating-point buckets, got"):
        hook(None, bucket)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_ddp_accepts_the_signature_on_every_backend(hook):
    """DDP's _check_comm_hook asks for this signature, and refuses two names without CUDA and NCCL."""
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")


@pytest.mark.parametrize("hook", HOOKS[:9], ids=lambda hook: hook.__qualname__)
def test_hooks_pickle_by_name(hook):
    assert pickle.loads(pickle.dumps(hook)) is hook


class FakeModel:
    def register_comm_hook(self, state, hook):
        self.registered = state, hook


def test_hook_types():
    expected = {
        "ALLREDUCE": default_hooks.allreduce_hook,
        "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        "BF16_COMPRESS": default_hooks.bf16_compress_hook,
        "QUANTIZE_PER_TENSOR": QUANTIZATION[0],
        "QUANTIZE_PER_CHANNEL": QUANTIZATION[1],
        "NOOP": debugging_hooks.noop_hook,
    }
    names = {kind.name for kind in DDPCommHookType}
    assert names == {*expected, *POWER_SGD, "AUTO"}
    assert names - {"AUTO"} <= {kind.name for kind in torch_hooks.DDPCommHookType}
    for name, hook in expected.items():
        model = FakeModel()
        register_ddp_comm_hook(DDPCommHookType[name], model)
        assert model.registered == (None, hook)
        DDPCommHookType[name].value(model=model, state="group")
        assert model.registered == ("group", hook)


POWER_SGD = {
    "POWER_SGD": (powerSGD_hook.powerSGD_hook, 1),
    "POWER_SGD_RANK2": (powerSGD_hook.powerSGD_hook, 2),
    "BATCHED_POWER_SGD": (powerSGD_hook.batched_powerSGD_hook, 1),
    "BATCHED_POWER_SGD_RANK2": (powerSGD_hook.batched_powerSGD_hook, 2),
}


@pytest.mark.parametrize("name", POWER_SGD)
def test_power_sgd_types_make_their_state(name, group_of_one):
    hook, rank = POWER_SGD[name]
    model = FakeModel()
    register_ddp_comm_hook(DDPCommHookType[name], model)
    state, registered = model.registered
    assert registered is hook
    assert (state.process_group, state.matrix_approximation_rank) == (None, rank)
    assert state.start_powerSGD_iter == 1_000
    group = dist.new_group([0])
    DDPCommHookType[name].value(model=model, state=group, start_powerSGD_iter=7)
    state, _ = model.registered
    assert (state.process_group, state.start_powerSGD_iter) == (group, 7)


def test_the_auto_type_makes_its_state(group_of_one):
    model = FakeModel()
    register_ddp_comm_hook(DDPCommHookType.AUTO, model, dist.group.WORLD)
    state, hook = model.registered
    assert hook is auto_hook
    assert (type(state), state.process_group) == (hooks.AutoState, dist.group.WORLD)


def test_wrapping_the_plain_hook_is_the_compress_hook():
    """Then the wrapper divides before it rounds, so that only the average must fit 16 bits."""
    wrap = default_hooks.fp16_compress_wrapper
    assert wrap(default_hooks.allreduce_hook) is default_hooks.fp16_compress_hook
    wrap = default_hooks.bf16_compress_wrapper
    assert wrap(default_hooks.allreduce_hook) is default_hooks.bf16_compress_hook


@pytest.mark.parametrize("hook", [*HOOKS[:3], *QUANTIZATION], ids=lambda hook: hook.__qualname__)
def test_a_state_that_is_no_process_group_is_shown(hook):
    bucket = GradBucket(0, torch.zeros(6), [torch.zeros(6)], True)
    with pytest.raises(TypeError, match=f"{hook.__qualname__} takes a process group or None.*got 'nccl'"):
        hook("nccl", bucket)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        hook(None, bucket)


class Duck:
    """An object with every attribute that isn't a bucket. The hook must not use its attributes."""

    def __getattr__(self, name):
        raise AssertionError(f"the hook used its {name}")


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_what_is_no_bucket_is_refused_before_anything_else(hook):
    """The bucket is refused first, also if the state would be refused."""
    for state in (None, "nccl", powerSGD_hook.PowerSGDState(None)):
        for bucket in (None, torch.ones(4), Duck()):
            with pytest.raises(
                TypeError, match=r"takes a torch\.distributed\.GradBucket or a gradcomp\.reducer"
            ):
                hook(state, bucket)


def test_a_wrapped_hook_that_is_not_callable_is_shown():
    with pytest.raises(TypeError, match=r"be callable\. fp16_compress_wrapper got 'noop'"):
        default_hooks.fp16_compress_wrapper("noop")
