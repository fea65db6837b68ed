"""Test when compression is recommended, and which hook."""

import pytest

from gradcomp.bench.recommendation import recommendation
from gradcomp.bench.steps import NOOP, HookTime

HOOKS = ("none", "bf16", "int8", "int4", "powersgd:8", "powersgd:16:int8")
RATES = {"none": 1, "bf16": 2, "int8": 3.9, "int4": 7.7, "powersgd:8": 6, "powersgd:16:int8": 160}


def recommended(noop_s=1.0, max_loss=0.02, rates=RATES, **steps):
    """Recommend a hook for these step times; a hook without a time takes as long as hook "none"."""
    step_s = {name: steps.get(name.replace(":", "_"), steps["none"]) for name in HOOKS}
    if "int4_hierarchical" in steps:
        step_s["int4 hierarchical"] = steps["int4_hierarchical"]
    hooks = [
        HookTime(name, each, each, each, 9, 1e9 / rates[name.split()[0]]) for name, each in step_s.items()
    ]
    return recommendation([HookTime(NOOP, noop_s, noop_s, noop_s, 9, 0.0), *hooks], max_loss)


def test_less_than_a_tenth_to_gain_means_not_to_compress():
    text = recommended(none=1.11, int4=1.0)
    assert text.startswith("Don't compress: without any communication a step would be only 10% faster")
    assert recommended(none=1.12, int4=1.0).startswith("Use int4: ")


def test_the_fastest_is_used_unless_one_that_costs_less_is_about_as_fast():
    assert recommended(none=9.0, bf16=5.0, int4=2.0, int8=3.0).startswith("Use int4: ")
    assert recommended(none=9.0, bf16=2.05, int4=2.0, int8=3.0).startswith("Use bf16: ")
    text = recommended(none=9.0, int4=2.0)
    assert "Use int4: a step is 4.50 times as fast; communication takes 89% of a step" in text


@pytest.mark.parametrize("max_loss", [0.0, 0.02, 0.05])
def test_a_hook_that_costs_too_much_is_not_used(max_loss):
    """powersgd:8 costs 0.032 nats."""
    text = recommended(none=9.0, powersgd_8=1.0, bf16=5.0, max_loss=max_loss)
    assert text.startswith("Use powersgd:8: " if max_loss == 0.05 else "Use bf16: ")
    text = recommended(none=9.0, powersgd_8=1.0, max_loss=max_loss)
    assert text.startswith("Use powersgd:8: " if max_loss == 0.05 else "Don't compress: ")


def test_a_cost_of_less_than_the_seeds_differ_counts_as_none():
    assert recommended(none=9.0, int8=2.05, int4=2.0).startswith("Use int8: ")
    assert recommended(none=9.0, int4=2.0, max_loss=0.003).startswith("Don't compress: "), "int4 costs 0.004"


def test_a_rate_beyond_the_measured_one_is_named():
    """powersgd:16:int8's cost was measured at 11 times fewer bytes."""
    text = recommended(none=9.0, int4=3.0, powersgd_16_int8=1.0)
    assert text.startswith("Use int4: ")
    assert "powersgd:16:int8 is 9.00 times as fast, but it sends 160 times fewer bytes here" in text
    assert "measured at 11.1 times fewer" in text
    text = recommended(none=9.0, int4=3.0, powersgd_16_int8=1.0, rates=RATES | {"powersgd:16:int8": 11})
    assert text.startswith("Use powersgd:16:int8: ")
    assert "but it sends" not in text


def test_no_hook_may_help():
    text = recommended(none=9.0)
    assert text.startswith(
        "Don't compress: communication takes 89% of a step without compression, but no hook"
    )


def test_16_bits_are_compared_with():
    text = recommended(none=9.0, bf16=5.0, int4=2.0)
    assert text.endswith(" It is 2.50 times as fast as with 16 bits (bf16).")
    assert "16 bits" not in recommended(none=9.0, bf16=2.0), "16 bits are not compared with themselves"


def test_the_faster_form_is_used():
    assert recommended(none=9.0, int4=2.0, int4_hierarchical=1.95).startswith("Use int4 hierarchical: ")
    assert recommended(none=9.0, int4=1.9, int4_hierarchical=1.95).startswith("Use int4: ")
