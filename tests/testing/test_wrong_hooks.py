"""The kit catches what inventors get wrong, and accuses no right hook."""

from dataclasses import replace

import pytest
import torch

from gradcomp.testing import PropertyFailure, Workload, check_hook, claims_of, properties
from gradcomp.testing.__main__ import main
from tests.depth import everyday
from tests.testing import wrong_hooks
from tests.testing.compressors import RandomK, TopK, hook
from tests.testing.right_hooks import RIGHT
from tests.testing.wrong_hooks import WRONG

pytestmark = pytest.mark.usefixtures("plain_torch")

# A small workload for each wrong hook on which the property fails.
SMALL = {
    wrong_hooks.TailNeverSent: Workload(((2, 700),), zero_steps=119),
    wrong_hooks.SixteenBitIndices: Workload(((70_000,),), zero_steps=119),
    wrong_hooks.SixteenBitTopK: Workload(((70_000,),), zero_steps=119),
    wrong_hooks.SeedsTheGlobalGenerator: Workload(((8,),)),
    wrong_hooks.ErrorLostAfterWarmUp: Workload(((8,),), steps=42, drift=1.0, zero_steps=119),
    wrong_hooks.ErrorTwiceUnderNoSync: Workload(((1, 2),), zero_steps=95, accumulated=True),
    wrong_hooks.SeedFromAString: Workload(((64,),)),
    wrong_hooks.ErrorInFp32: Workload(((2,),), dtype=torch.float64, zero_steps=95),
    wrong_hooks.DividedByTwo: Workload(((2,),), world_size=3, zero_steps=119),
    wrong_hooks.FifthRankSkipped: Workload(((1, 24),), world_size=5, zero_steps=119),
    wrong_hooks.FourthRankSkipped: Workload(((1, 24),), world_size=4, zero_steps=119),
    wrong_hooks.DefaultGroup: Workload(((8,),), groups=2),
    wrong_hooks.PaddingErases: Workload(
        ((1, 24),), world_size=3, steps=3, spectra=("ties",), noise=1.0, zero_steps=119
    ),
    wrong_hooks.LastAveragePredicted: Workload(((4,),), steps=3, zero_steps=63),
    wrong_hooks.SentTwice: Workload(((4,),), zero_steps=95),
    wrong_hooks.ErrorsBySize: Workload(
        ((8,), (8,)), ((0,), (1,)), steps=5, noise=1.0, drift=1.0, zero_steps=119
    ),
}


def test_every_wrong_hook_has_a_small_workload():
    assert SMALL.keys() == WRONG.keys()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_hook_fails_on_a_small_workload_and_the_right_one_does_not(wrong):
    check = getattr(properties, WRONG[wrong])
    right = next(
        each for each in (*(make_state for _, make_state, _ in RIGHT.values()),) if each in wrong.__mro__
    )
    claims = claims_of(hook, right)
    check(hook, right, SMALL[wrong], claims=claims)
    with pytest.raises(PropertyFailure, match=f"^{WRONG[wrong]}: "):
        check(hook, wrong, SMALL[wrong], claims=claims)


@pytest.mark.parametrize("wrong", everyday([wrong_hooks.DefaultGroup], list(WRONG)))
def test_a_wrong_hook_is_found_at_the_default_settings(wrong):
    only = everyday([WRONG[wrong]], [])
    assert WRONG[wrong] in [failure.property for failure in check_hook(hook, wrong, only=only).failures]


@pytest.mark.parametrize("name", everyday(["round robin"], list(RIGHT)))
def test_a_right_hook_is_not_accused(name):
    right, make_state, changes = RIGHT[name]
    claims = replace(claims_of(right, make_state), **changes)
    options = everyday({"max_examples": 3, "processes": False}, {})
    check_hook(right, make_state, claims=claims, **options).raise_if_failed()


def test_the_command_line(capsys):
    names = ["tests.testing.compressors:hook", "tests.testing.wrong_hooks:SeedsTheGlobalGenerator"]
    options = ["--examples", "1", "--only", "random_state_kept", "--dtype", "float64", "--no-processes"]
    assert main([*names, *options]) == 1
    assert "expected torch's global generator to go on from the user's seed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["nothing:here"])
    assert "name 'nothing:here': module 'nothing' can't be imported" in capsys.readouterr().err


def test_a_hook_that_is_no_average_needs_claims():
    right, make_state, _ = RIGHT["majority sign"]
    report = check_hook(right, make_state, max_examples=2, only=["unbiased"])
    assert "claimed unbiased True; " in str(report)


def test_a_wrong_claim_is_named():
    claims = replace(claims_of(hook, TopK), contraction=0.9)
    (failure,) = check_hook(hook, TopK, max_examples=3, claims=claims, only=["contraction"]).failures
    assert failure.message.startswith("contraction: claimed contraction 0.9; got 0.")


def test_a_test_to_copy_fails_without_the_kit(tmp_path, run_ranks):
    """It runs here in processes that are started sooner than its own."""
    report = check_hook(
        hook, wrong_hooks.DividedByTwo, world_size=3, max_examples=2, only=["held_back_comes_out"]
    )
    (failure,) = report.failures
    assert "The same without gradcomp.testing:" in str(report)
    assert "gradcomp.testing" not in failure.test
    assert len([line for line in failure.test.splitlines() if line]) <= 14
    with pytest.raises(AssertionError, match="AssertionError"):
        run_ranks(run_copied, 3, failure.test)
    run_ranks(
        run_copied, 3, failure.test.replace("DividedByTwo", "RandomK").replace("wrong_hooks", "compressors")
    )
    assert RandomK.__module__ == "tests.testing.compressors"


def run_copied(rank, text):
    """Run the function `check` of a copied test in a group that exists already."""
    text = "\n".join(line for line in text.splitlines() if "init_process_group" not in line)
    scope = {}
    exec(text, scope)
    scope["check"](rank)
