"""Test hooks by name, and their costs in accuracy, which are those of docs/accuracy.md."""

import re
from dataclasses import replace

import pytest
import torch

from gradcomp.compress.powersgd import PowerSGDOptions
from gradcomp.compress.state import compress_hook
from gradcomp.hooks import default_hooks, powerSGD_hook, quantization_hooks
from gradcomp.hooks.named_hooks import COSTS, COSTS_ON_2_RANKS, HOOKS, NAMES, NamedHook, forms_of
from tests.programs import ROOT


def cost_of(name):
    return NamedHook.form_named(name).cost


def test_names():
    for name in (*NAMES, *HOOKS, "batched:2", "powersgd:2:int8:start4"):
        assert NamedHook.named(name).name == name
    factors = {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16}
    assert NamedHook.named("powersgd:32:int8").options == PowerSGDOptions(32, **factors)
    assert NamedHook.named("batched:3:fp16:start8").options == PowerSGDOptions(
        3, factor_dtype=torch.float16, start_bits=8, square=True
    )
    for wrong in ("", "int2", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:4:int4", "int4:256"):
        with pytest.raises(ValueError, match=r"there is no hook .* known are none"):
            NamedHook.named(wrong)


@pytest.mark.parametrize("name", [*HOOKS, "bf16 hierarchical", "powersgd:2:int8:start4", "batched:3"])
def test_what_is_registered_has_the_options(name):
    hook = NamedHook.form_named(name)
    state, registered = hook.state_and_hook(3, 4)
    if state is None:
        kind = {"none": "allreduce_hook", "allreduce": "allreduce_hook"}.get(name, f"{name}_compress_hook")
        assert registered is getattr(default_hooks, kind)
    else:
        assert (state.start_iter, state.ranks_per_node) == (3, 4)
        is_square = name.startswith("batched")
        assert (replace(state.options, square=True) if is_square else state.options) == hook.options
        batched, plain = powerSGD_hook.batched_powerSGD_hook, powerSGD_hook.powerSGD_hook
        quantized = compress_hook if hook.is_hierarchical else quantization_hooks.quantization_hook
        assert registered is (batched if is_square else plain if "powersgd" in name else quantized)


def test_forms():
    hooks = list(map(NamedHook.named, ("bf16", "int4", "powersgd:4", "powersgd:4:int8")))
    nccl, gloo = (
        [form.name for form in forms_of(hooks, has_nodes=True, is_gloo=is_gloo) if form.is_hierarchical]
        for is_gloo in (False, True)
    )
    assert nccl == ["int4 hierarchical", "powersgd:4:int8 hierarchical"]
    assert gloo == [f"{hook.name} hierarchical" for hook in hooks]
    assert list(forms_of(hooks, has_nodes=False, is_gloo=True)) == hooks
    flat, form = NamedHook.named("int4"), NamedHook.form_named("int4 hierarchical")
    assert form == replace(flat, name="int4 hierarchical", is_hierarchical=True)


def test_costs_are_those_of_the_page():
    page = (ROOT / "docs" / "accuracy.md").read_text()
    gpt = page[page.index("\ngpt: ") :].partition("\n\n")[0]
    row = re.compile(r"^(\S+) .* ([+-]\d\.\d{3}) ±", re.MULTILINE)
    on_page = {name: float(nats) for name, nats in row.findall(gpt)}
    assert {name: on_page.get(name, 0.0) for name in COSTS} == COSTS
    assert on_page.keys() - COSTS.keys() == {"int4:64", "alone"}


def test_costs_of_hooks_that_were_not_measured():
    assert cost_of("powersgd:16:bf16") == COSTS["powersgd:16:int8"]
    assert cost_of("powersgd:1:int8") == COSTS_ON_2_RANKS["powersgd:1"]
    assert cost_of("powersgd:32") is cost_of("batched:4") is cost_of("int4:64") is None
    assert all(cost_of(name) is not None for name in NAMES)


def test_hierarchical_costs_what_flat_costs():
    for name in ("int8", "int4", "powersgd:16:int8"):
        assert cost_of(f"{name} hierarchical") == cost_of(name)
