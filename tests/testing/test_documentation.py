"""The examples of docs/testing.md run, and print the documented output."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from gradcomp.testing import PropertyFailure, Workload, check_hook, properties
from tests.depth import everyday
from tests.programs import run_python

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
PROPERTIES = set(properties.__all__)


def example(monkeypatch, tmp_path, name, leave_out=""):
    """Import the code of docs/testing.md, up to its first test, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    source = "\n".join(blocks[1:3])
    assert leave_out in source
    path = tmp_path / f"{name}.py"
    path.write_text("\n".join(line for line in source.splitlines() if not leave_out or leave_out not in line))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def without_numbers(text):
    return re.sub(r" +", " ", re.sub(r"[-+.e\d]*\d", "#", text))


def test_the_documented_top_k_hook(tmp_path, monkeypatch):
    sound = example(monkeypatch, tmp_path, "top_k")
    # Other processes can't import the example.
    report = check_hook(sound.top_k_hook, sound.TopKState, max_examples=everyday(2, 10), processes=False)
    report.raise_if_failed()
    rows = {without_numbers(row) for row in str(report).splitlines()} | {"same_in_processes holds #"}
    documented = re.search(
        r"^top_k_hook\nproperty .*?(?=```)", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert rows >= set(without_numbers(documented[0]).splitlines())
    without = example(monkeypatch, tmp_path, "top_k_without_error_feedback", leave_out="# error feedback")
    (failure,) = check_hook(without.top_k_hook, without.TopKState, only=["unbiased"]).failures
    documented, *message = re.findall(r"unbiased fails for\n  (.*)\n  (.*)\n  (.*)", DOCS.read_text())[0]
    assert without_numbers(failure.message) == without_numbers("\n".join(message))
    for workload in (failure.counterexample, eval(documented, {"Workload": Workload})):
        with pytest.raises(PropertyFailure, match="with two gradients in turn"):
            properties.unbiased(without.top_k_hook, without.TopKState, workload)


@pytest.mark.usefixtures("plain_torch")
def test_the_documented_comparison(tmp_path, monkeypatch, capsys):
    text = DOCS.read_text().partition("## How much a hook keeps")[2]
    source, table = re.findall(r"```(?:python)?\n(.*?)```", text, flags=re.DOTALL)[:2]
    exec(source, vars(example(monkeypatch, tmp_path, "top_k")))
    assert without_numbers(capsys.readouterr().out) == without_numbers(table)


def test_the_documentation_names_every_property():
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", DOCS.read_text(), flags=re.MULTILINE)
    assert set(rows) >= PROPERTIES


def test_without_hypothesis_the_package_says_what_it_needs():
    code = "import sys; sys.modules['hypothesis'] = None; import gradcomp; import gradcomp.testing"
    assert "ImportError: gradcomp.testing needs Hypothesis: pip install" in run_python("-c", code).stderr
