"""Test hooks by name, and their costs in accuracy, which are those of docs/accuracy.md."""

import re

import pytest
import torch

from gradcomp.compress.accuracy_cost import MEASURED, accuracy_cost
from gradcomp.compress.named import NAMES, NamedHook
from tests.programs import ROOT


def test_names():
    assert [NamedHook.named(name).name for name in NAMES] == list(NAMES)
    hook = NamedHook("powersgd:32:int8", rank=32, wire_dtype=torch.int8)
    assert NamedHook.named("powersgd:32:int8") == hook
    for wrong in ("", "int2", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:4:int4", "int4:256"):
        with pytest.raises(ValueError, match=r"there is no hook .* known are none"):
            NamedHook.named(wrong)


def test_only_hooks_with_a_state_are_by_nodes():
    for name in ("none", "bf16", "fp16"):
        with pytest.raises(ValueError, match=f"{name} can't be by nodes; hooks with a state can"):
            NamedHook.named(name).by_nodes()
    for name, on_nccl in (("bf16", False), ("int4", True), ("powersgd:4", False), ("powersgd:4:int8", True)):
        assert NamedHook.named(name).has_form_by_nodes(is_gloo=False) is on_nccl
        assert NamedHook.named(name).has_form_by_nodes(is_gloo=True) is (name != "bf16")
    twice = NamedHook.named("int4").by_nodes().by_nodes()
    assert twice == NamedHook.named("int4").by_nodes()
    assert (twice.name, twice.flat_name) == ("int4 by nodes", "int4")


def test_costs_are_those_of_the_page():
    page = (ROOT / "docs" / "accuracy.md").read_text()
    gpt = page[page.index("\ngpt: ") :].partition("\n\n")[0]
    row = re.compile(r"^(\S+) +[\d,]+ +([\d.]+)× .*? ([+-]\d\.\d{3}) ±", re.MULTILINE)
    on_page = {name: (float(nats), float(rate)) for name, rate, nats in row.findall(gpt)}
    costs = {name: (cost.nats, cost.rate) for name, cost in MEASURED.items() if name != "none"}
    assert costs == {name: on_page[name] for name in costs}
    assert costs.keys() >= on_page.keys() - {"int4:64"}


def test_costs_of_hooks_that_were_not_measured():
    assert accuracy_cost(NamedHook.named("powersgd:16:bf16")).nats == MEASURED["powersgd:16:int8"].nats
    assert "int8" in accuracy_cost(NamedHook.named("powersgd:16:bf16")).note
    assert accuracy_cost(NamedHook.named("powersgd:1:int8")).note == "2 ranks, fp32 factors"
    assert accuracy_cost(NamedHook.named("powersgd:32")) is None
    assert all(accuracy_cost(NamedHook.named(name)) is not None for name in NAMES)


def test_by_nodes_costs_what_flat_costs():
    for name in ("int8", "int4", "powersgd:16:int8"):
        hook = NamedHook.named(name)
        assert accuracy_cost(hook.by_nodes()) == accuracy_cost(hook)
