"""Run the recipes of docs/frameworks against the real packages, on two processes."""

import os
import re
import tempfile

import pytest

from tests.frameworks.recipes import EXAMPLES, PAGES, run
from tests.programs import ROOT, TORCHRUN


@pytest.mark.parametrize(("page", "recipe"), PAGES.items())
def test_every_page_links_its_recipe_and_has_its_calls(page, recipe):
    text, source = (ROOT / "docs" / page).read_text(), (EXAMPLES / recipe).read_text()
    assert f"(../examples/{recipe})" in text
    calls = re.findall(
        r"(register_comm_hook|CommHook|CommHookCallback|DistributedDataParallel|rescale_errors|LocalSteps)\(",
        text,
    )
    assert calls
    assert all(f"{call}(" in source for call in calls)


@pytest.mark.parametrize(
    ("name", "launcher", "steps", "rate"),
    [
        ("lightning_trainer.py", (), [24, 48], 2.5),
        ("lightning_fabric.py", (), [50, 100], 7),
        ("accelerate_loop.py", TORCHRUN, [32, 64], 2.5),
        ("zero_redundancy.py", TORCHRUN, [50, 100], 3),
    ],
)
def test_recipes_that_save_and_resume(name, launcher, steps, rate, tmp_path):
    _, found = run(*launcher, EXAMPLES / name, tmp_path, folder=tmp_path)
    check_resumed(found, steps, rate)


def test_ray_train(tmp_path):
    # Ray's sockets lie in its temporary folder, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        _, found = run(
            EXAMPLES / "ray_train.py",
            os.path.relpath(tmp_path, ROOT),
            folder=tmp_path,
            RAY_TMPDIR=short,
            RAY_USAGE_STATS_ENABLED="0",
            timeout_s=400,
        )
    check_resumed(found, [50, 100], 7)


@pytest.mark.parametrize(
    ("name", "argument", "steps"),
    [("torchrun_ddp.py", "checkpoint.pt", [50, 100]), ("transformers_trainer.py", "runs", [40, 80])],
)
def test_recipes_that_a_second_call_continues(name, argument, steps, tmp_path):
    calls = [run(*TORCHRUN, EXAMPLES / name, tmp_path / argument, folder=tmp_path) for _ in range(2)]
    check_resumed([line for _, found in calls for line in found], steps, 6.9)


def check_resumed(found, steps, rate):
    """Check that two runs were printed, and that the second run continues where the first ended."""
    assert [int(step) for step, *_ in found] == steps
    (_, first, end, _), (_, again, last, bytes_saved) = found
    assert end < 0.9 * first
    assert again < (first + end) / 2
    assert last < end
    assert bytes_saved > rate


def test_compiling_before_and_after_wrapping(tmp_path):
    printed, found = run(*TORCHRUN, EXAMPLES / "torch_compile.py", folder=tmp_path)
    assert re.findall(r"(\w+, then \w+)", printed) == ["compiled, then wrapped", "wrapped, then compiled"]
    for _, first, last, rate in found:
        assert last < 0.9 * first
        assert rate > 7


def test_mixed_precision(tmp_path):
    printed, [(steps, first, last, rate)] = run(*TORCHRUN, EXAMPLES / "mixed_precision.py", folder=tmp_path)
    assert (steps, rate > 7, last < 0.9 * first) == (60, True, True)
    assert len(re.findall(r"\d\.0", printed.partition("scales")[2])) > 2  # the scale changed more than once


def test_local_steps(tmp_path):
    _, [(steps, first, last, rate)] = run(*TORCHRUN, EXAMPLES / "local_steps.py", folder=tmp_path)
    assert (steps, rate > 140, last < 0.9 * first) == (120, True, True)


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_callbacks_know_the_scale_of_every_backward(framework, tmp_path):
    printed, _ = run(ROOT / "tests/frameworks/followed_scale.py", framework, tmp_path, folder=tmp_path)
    assert printed.endswith("every scale was known\n")


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_what_pages_say_is_also_tested(framework, tmp_path):
    program = ROOT / "tests/frameworks/also_tested.py"
    printed, _ = run(*TORCHRUN, program, framework, tmp_path, folder=tmp_path)
    assert printed.count("all of it works") == 2
