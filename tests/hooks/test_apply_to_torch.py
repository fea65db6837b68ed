"""Test apply_to_torch, which puts gradcomp's hooks in place of torch's for a while."""

import gc
from types import ModuleType

import pytest
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

import gradcomp
from gradcomp import hooks

NAMES = {
    default_hooks: (
        *("allreduce_hook", "bf16_compress_hook", "bf16_compress_wrapper"),
        *("fp16_compress_hook", "fp16_compress_wrapper"),
    ),
    powerSGD_hook: ("PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"),
    quantization_hooks: ("quantization_perchannel_hook", "quantization_pertensor_hook"),
    debugging_hooks: ("noop_hook",),
    ddp_comm_hooks: ("DDPCommHookType", "register_ddp_comm_hook"),
}


def present():
    return {(module.__name__, name): value for module in NAMES for name, value in vars(module).items()}


def test_every_common_name_is_replaced_and_put_back():
    before = present()
    with gradcomp.apply_to_torch():
        for module, names in NAMES.items():
            ours = getattr(hooks, module.__name__.rpartition(".")[2], hooks)
            for name in names:
                assert getattr(module, name) is getattr(ours, name)
        replaced = {key for key, value in present().items() if value is not before[key]}
        assert replaced == {(module.__name__, name) for module, names in NAMES.items() for name in names}
    assert present() == before


def test_what_was_there_is_put_back_after_an_error_and_inside_another():
    before = present()
    with gradcomp.apply_to_torch():
        with gradcomp.apply_to_torch():
            pass
        assert default_hooks.fp16_compress_hook is hooks.default_hooks.fp16_compress_hook
    assert present() == before
    with pytest.raises(KeyError), gradcomp.apply_to_torch():
        raise KeyError
    assert present() == before


def test_a_call_alone_takes_effect_at_once_and_for_good():
    """A block within it does not end it."""
    before = present()
    block = gradcomp.apply_to_torch()
    gc.collect()
    with gradcomp.apply_to_torch():
        assert quantization_hooks.quantization_pertensor_hook is (
            hooks.quantization_hooks.quantization_pertensor_hook
        )
    assert powerSGD_hook.PowerSGDState is hooks.powerSGD_hook.PowerSGDState
    with block:  # so that this test ends
        pass
    assert present() == before


def test_an_error_half_way_puts_everything_back(monkeypatch):
    class Refusing(ModuleType):
        def __setattr__(self, name, value):
            if value is hooks.debugging_hooks.noop_hook:
                raise AttributeError(name)
            super().__setattr__(name, value)

    before = present()
    monkeypatch.setattr(debugging_hooks, "__class__", Refusing)
    with pytest.raises(AttributeError, match="noop_hook"), gradcomp.apply_to_torch():
        raise AssertionError("the block must not begin")
    assert present() == before
    monkeypatch.undo()
    with gradcomp.apply_to_torch():
        assert debugging_hooks.noop_hook is hooks.debugging_hooks.noop_hook
    assert present() == before
