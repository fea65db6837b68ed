"""When compression is recommended, and which hook."""

from dataclasses import replace

import pytest

from gradcomp.plan.candidates import CANDIDATES
from gradcomp.plan.prediction import StepPrediction
from gradcomp.plan.recommendation import eligible, recommend, sentences

HOOKS = [CANDIDATES[name] for name in ("none", "bf16", "int8", "int4", "powersgd:8", "powersgd:16:int8")]
RATES = {"none": 1, "bf16": 2, "int8": 3.9, "int4": 7.7, "powersgd:8": 6, "powersgd:16:int8": 160}


def recommended(noop_s=1.0, max_loss=0.02, rates=RATES, **steps):
    """Recommend a hook for these step times; a hook that isn't given takes as long as none."""
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


@pytest.mark.parametrize("max_loss", [0.0, 1.0])
def test_limits_of_the_cost(max_loss):
    names = {hook.name for hook in eligible(HOOKS, max_loss)}
    assert names == ({"none", "bf16", "int8"} if max_loss == 0 else {hook.name for hook in HOOKS})
