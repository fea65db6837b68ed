"""The hooks' names, signatures and errors: what a user who changes one import relies on."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks as torch_hooks

from gradcomp import hooks
from gradcomp.hooks import DDPCommHookType, debugging_hooks, default_hooks, register_ddp_comm_hook

MODULES = ["default_hooks", "debugging_hooks"]
HOOKS = [
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
    default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook),
    default_hooks.bf16_compress_wrapper(debugging_hooks.noop_hook),
]


@pytest.mark.parametrize("name", MODULES)
def test_modules_mirror_torch(name):
    ours = getattr(hooks, name)
    theirs = getattr(torch_hooks, {"default_hooks": "default", "debugging_hooks": "debugging"}[name])
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    for function in theirs.__all__:
        parameters = list(inspect.signature(getattr(theirs, function)).parameters)
        assert list(inspect.signature(getattr(ours, function)).parameters) == parameters


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_ddp_accepts_the_signature_on_every_backend(hook):
    """What DDP's _check_comm_hook asks of a hook; it refuses two names unless CUDA and NCCL are there."""
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")


@pytest.mark.parametrize("hook", HOOKS[:4], ids=lambda hook: hook.__qualname__)
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
        "NOOP": debugging_hooks.noop_hook,
    }
    assert {kind.name for kind in DDPCommHookType} == set(expected)
    assert set(expected) <= {kind.name for kind in torch_hooks.DDPCommHookType}
    for name, hook in expected.items():
        model = FakeModel()
        register_ddp_comm_hook(DDPCommHookType[name], model)
        assert model.registered == (None, hook)
        DDPCommHookType[name].value(model=model, state="group")
        assert model.registered == ("group", hook)


def test_wrapping_the_plain_hook_is_the_compress_hook():
    """So that the wrapper divides before it rounds, where only the plain hook's average has to fit."""
    wrap = default_hooks.fp16_compress_wrapper
    assert wrap(default_hooks.allreduce_hook) is default_hooks.fp16_compress_hook
    wrap = default_hooks.bf16_compress_wrapper
    assert wrap(default_hooks.allreduce_hook) is default_hooks.bf16_compress_hook


@pytest.mark.parametrize("hook", HOOKS[:3], ids=lambda hook: hook.__qualname__)
def test_a_state_that_is_no_process_group_is_shown(hook):
    with pytest.raises(TypeError, match=f"{hook.__qualname__} takes a process group or None.*got 'nccl'"):
        hook("nccl", bucket=None)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        hook(None, bucket=None)


def test_a_wrapped_hook_that_is_not_callable_is_shown():
    with pytest.raises(TypeError, match="fp16_compress_wrapper wraps a communication hook, got 'noop'"):
        default_hooks.fp16_compress_wrapper("noop")
