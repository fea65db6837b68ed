"""Test when compression is recommended, and which hook."""

from dataclasses import replace

import pytest
import torch

from gradcomp.compress.accuracy_cost import accuracy_cost
from gradcomp.plan.candidates import CANDIDATES
from gradcomp.plan.hardware import GPUS, Link, Nodes
from gradcomp.plan.models import buckets_of, built_in_model
from gradcomp.plan.prediction import Compute, StepPrediction
from gradcomp.plan.recommendation import Scenario, eligible, recommend, sentences

HOOKS = [CANDIDATES[name] for name in ("none", "bf16", "int8", "int4", "powersgd:8", "powersgd:16:int8")]
RATES = {"none": 1, "bf16": 2, "int8": 3.9, "int4": 7.7, "powersgd:8": 6, "powersgd:16:int8": 160}


def recommended(noop_s=1.0, max_loss=0.02, rates=RATES, **steps):
    """Recommend a hook for these step times; a hook without a time takes as long as hook "none"."""
    step_s = {hook.name: steps.get(hook.name.replace(":", "_"), steps["none"]) for hook in HOOKS}
    plain = StepPrediction("none", 4, 1e9, 1e9, 0.0, 1.0, 0.0, 1.0)
    predictions = {
        name: replace(plain, hook=name, collective_bytes=1e9 / rates[name], step_s=step_s[name])
        for name in step_s
    }
    found = recommend(predictions, noop_s, HOOKS, max_loss)
    return found, sentences(found, predictions, HOOKS, max_loss)


def test_less_than_a_tenth_to_gain_means_not_to_compress():
    found, text = recommended(none=1.11, int4=1.0)
    assert found.hook == found.untested == "none"
    assert text.startswith("Don't compress: without any communication a step would be only 10% faster")
    assert recommended(none=1.12, int4=1.0)[0].hook == "int4"


def test_the_fastest_is_used_unless_one_that_costs_less_is_about_as_fast():
    assert recommended(none=9.0, bf16=5.0, int4=2.0, int8=3.0)[0].hook == "int4"
    assert recommended(none=9.0, bf16=2.05, int4=2.0, int8=3.0)[0].hook == "bf16"
    found, text = recommended(none=9.0, int4=2.0)
    assert found.speedup == 4.5
    assert "Use int4: a step is 4.5 times as fast; communication takes 89% of a step" in text


def test_a_hook_that_costs_too_much_is_not_used():
    within = [hook.name for hook in eligible(HOOKS, 0.02)]
    assert "powersgd:8" not in within
    assert within[0] == "none"
    assert within[-1] in ("int4", "powersgd:16:int8")
    assert recommended(none=9.0, powersgd_8=1.0)[0].hook == "none"
    assert recommended(none=9.0, powersgd_8=1.0, max_loss=0.05)[0].hook == "powersgd:8"
    assert recommended(none=9.0, powersgd_8=1.0, bf16=5.0)[0].hook == "bf16"


def test_a_rate_beyond_the_measured_one_is_named():
    """powersgd:16:int8's cost was measured at 11 times fewer bytes."""
    found, text = recommended(none=9.0, int4=3.0, powersgd_16_int8=1.0)
    assert (found.hook, found.untested) == ("int4", "powersgd:16:int8")
    assert "powersgd:16:int8 would be 9.0 times as fast, but it sends 160 times fewer bytes here" in text
    assert "measured at 11 times fewer" in text
    found, text = recommended(
        none=9.0, int4=3.0, powersgd_16_int8=1.0, rates=RATES | {"powersgd:16:int8": 11}
    )
    assert found.hook == found.untested == "powersgd:16:int8"
    assert "would be" not in text


def test_no_hook_may_help():
    found, text = recommended(none=9.0)
    assert found.hook == "none"
    assert text.startswith(
        "Don't compress: communication takes 89% of a step without compression, but no hook"
    )


def test_16_bits_are_compared_with():
    found, text = recommended(none=9.0, bf16=5.0, int4=2.0)
    assert found.hook == "int4"
    assert "It is 2.5 times as fast as with 16 bits (bf16)." in text
    assert "16 bits" not in recommended(none=9.0, bf16=2.0)[1], "16 bits are not compared with themselves"
    _, text = recommended(none=9.0, bf16=5.0, int4=3.0, powersgd_16_int8=1.0)
    assert text.endswith("Against 16 bits it would be 5.0 times as fast, with 80 times fewer bytes.")


# --- nodes ---

GPT2 = buckets_of(built_in_model("gpt2-medium").parameters)


def scenario(*names):
    return Scenario(
        "gpt2-medium",
        tuple(GPT2),
        torch.float32,
        GPUS[0],
        "nccl",
        Compute(0.007, 0.015, 0.003),
        tuple(CANDIDATES[name] for name in ("none", *names)),
        max_loss=0.02,
        compute_source="",
        cost_source="",
    )


def on_nodes(ranks, *names, world_size=32, within=360e9, gigabits=12.5):
    """Return the recommended hook and the sentences."""
    plan, link = scenario(*names), Link(gigabits * 1e9 / 8, 1e-5, True, nodes=Nodes(ranks, within))
    found, hooks = plan.recommend(link, world_size), plan.forms(link, world_size)
    return found.hook, sentences(found, plan.predict(link, world_size), hooks, 0.02, ranks)


def test_the_recommendation_depends_on_a_nodes_ranks():
    """int4 flat: 6.8 times as fast on nodes of one rank, but hardly faster than bf16 on nodes of eight."""
    assert on_nodes(1, "bf16", "int4")[0] == "int4"
    assert on_nodes(8, "bf16", "int4")[0] == "int4 by nodes"
    flat = scenario("bf16", "int4").predict(Link(12.5e9 / 8, 1e-5, True, nodes=Nodes(8, 360e9)), 32)
    assert flat["bf16"].step_s / flat["int4"].step_s == pytest.approx(1.08, abs=0.02)


def test_flat_int8_is_slower_than_16_bits_on_nodes_of_eight():
    link = Link(12.5e9 / 8, 1e-5, True, nodes=Nodes(8, 360e9))
    found = scenario("bf16", "int8").predict(link, 32)
    assert found["int8"].step_s > 1.5 * found["bf16"].step_s > 3 * found["int8 by nodes"].step_s


def test_flat_is_recommended_where_links_within_are_slow():
    """The exact sum within a node sends 4 B per element on its links; flat hooks exchange only codes."""
    hook, text = on_nodes(2, "bf16", "int4", within=0.5e9, gigabits=100)
    assert hook == "int4"
    assert "Use int4 flat: a step is" in text
    assert "Its state: QuantizationState(bits=4, ranks_per_node=1)." in text
    hook, text = on_nodes(2, "bf16", "int4", within=360e9, gigabits=10)
    assert hook == "int4 by nodes"
    assert "Use int4 by nodes: a step is" in text
    assert "Its state: QuantizationState(bits=4, ranks_per_node=2)." in text


def test_no_form_is_named_where_there_is_one():
    assert "state" not in on_nodes(1, "bf16", "int4")[1]
    assert "state" not in on_nodes(8, "bf16")[1]
    hook, text = on_nodes(8, "bf16", "int4", world_size=8, within=1e8)
    assert hook == "int4"
    assert "Use int4: " in text
    assert "state" not in text


def test_an_untested_form_is_written_too():
    _, text = on_nodes(8, "bf16", "int4", "powersgd:16:int8")
    assert "powersgd:16:int8 by nodes would be" in text
    assert "but it compresses to 179 times fewer bytes here" in text
    assert text.endswith("uncompressed_dtype=torch.bfloat16, ranks_per_node=8).")


def test_by_nodes_costs_what_flat_costs():
    for hook in CANDIDATES.values():
        if hook.is_quantized:
            assert accuracy_cost(hook.by_nodes()) == accuracy_cost(hook)


@pytest.mark.parametrize("max_loss", [0.0, 1.0])
def test_limits_of_the_cost(max_loss):
    names = {hook.name for hook in eligible(HOOKS, max_loss)}
    assert names == ({"none", "bf16", "int8"} if max_loss == 0 else {hook.name for hook in HOOKS})
