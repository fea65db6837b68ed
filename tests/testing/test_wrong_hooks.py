"""The kit catches what inventors get wrong, and accuses no right hook."""

from dataclasses import replace

import pytest

from gradcomp.testing import PropertyFailure, Workload, check_hook, claims_of, properties
from gradcomp.testing.__main__ import main
from tests.depth import everyday
from tests.programs import refusal
from tests.testing import wrong_hooks
from tests.testing.compressors import TopK, hook
from tests.testing.right_hooks import RIGHT, OneBit
from tests.testing.wrong_hooks import FINDERS, WRONG

pytestmark = pytest.mark.usefixtures("plain_torch")


def finder_of(wrong):
    """Return the name of the property that must find a wrong hook."""
    return FINDERS.get(wrong, "held_back_comes_out")


def right_of(wrong):
    """Return the right hook's state, and the changes to its claims."""
    return next((make, changes) for _, make, changes in RIGHT.values() if make in wrong.__mro__)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_hook_fails_on_a_small_workload_and_the_right_one_does_not(wrong):
    check = getattr(properties, finder_of(wrong))
    right, changes = right_of(wrong)
    claims = replace(claims_of(hook, right), **changes)
    check(hook, right, WRONG[wrong], claims=claims)
    with pytest.raises(PropertyFailure, match=f"^{finder_of(wrong)}: "):
        check(hook, wrong, WRONG[wrong], claims=claims)


@pytest.mark.parametrize("wrong", everyday([wrong_hooks.DefaultGroup], list(WRONG)))
def test_a_wrong_hook_is_found_at_the_default_settings(wrong):
    only, (_, changes) = everyday([finder_of(wrong)], []), right_of(wrong)
    claims = replace(claims_of(hook, wrong), **changes) if changes else None
    report = check_hook(hook, wrong, only=only, claims=claims)
    assert finder_of(wrong) in [failure.property for failure in report.failures]


@pytest.mark.parametrize("name", everyday(["round robin"], list(RIGHT)))
def test_a_right_hook_is_not_accused(name):
    right, make_state, changes = RIGHT[name]
    claims = replace(claims_of(right, make_state), **changes)
    options = everyday({"max_examples": 3, "processes": False}, {})
    check_hook(right, make_state, claims=claims, **options).raise_if_failed()


def test_errors_may_come_out_slowly():
    properties.held_back_comes_out(hook, OneBit, Workload(((5, 1),), sparsity=0.9))


def test_the_command_line(capsys):
    names = ["tests.testing.compressors:hook", "tests.testing.wrong_hooks:SeedsTheGlobalGenerator"]
    options = ["--examples", "1", "--only", "random_state_kept", "--claim", "density=0.4", "--no-processes"]
    assert main([*names, *options]) == 1
    assert "expected torch's global generator to go on from the user's seed" in capsys.readouterr().out
    for wrong, message in (
        (["nothing:here"], "hook 'nothing:here': module 'nothing' fails: ModuleNotFoundError"),
        ([*names, "--only", "foo"], "argument --only: invalid choice: 'foo'"),
        ([*names, "--claim", "foo"], "argument --claim: 'foo' is not NAME=VALUE"),
        ([*names, "--device", "cpux"], "error: --device cpux: Expected one of cpu, cuda"),
    ):
        assert message in refusal(capsys, main, wrong)


def test_a_wrong_claim_is_named():
    claims = replace(claims_of(hook, TopK), contraction=0.9)
    report = check_hook(hook, TopK, max_examples=3, claims=claims, only=["contraction"])
    assert report.failures[0].message.startswith("contraction: claimed contraction 0.9; got 0.")
    assert report.failures[0].message.endswith("\nIf that is intended, claim contraction=None")
    assert str(report).endswith("replace(claims_of(hook, make_state), contraction=None)")
