"""Check CITATION.cff, pre-commit's configuration and GitHub's workflow, which no other test reads."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install pyyaml")


def parsed(name: str):
    return yaml.safe_load((ROOT / name).read_text())


def in_project(pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


def test_the_citation_has_what_the_format_requires():
    citation = parsed("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert [citation["version"]] == in_project('^version = "(.+)"$')
    assert [citation["license"]] == in_project('^license = "(.+)"$')
    assert citation["repository-code"] in in_project('^Source = "(.+)"$')
    for work in (citation, *citation["references"]):
        assert isinstance(work["title"], str)
        for author in work["authors"]:
            assert author.keys() in ({"name"}, {"family-names", "given-names"})
    for reference in citation["references"]:
        assert reference["type"] in ("article", "conference-paper")
        assert isinstance(reference["year"], int)
        assert ("url" in reference) != ("doi" in reference)


def test_the_citation_lists_what_the_project_builds_on():
    """The first author and the year of each paper stand in a docstring or on a page."""
    files = [*ROOT.glob("gradcomp/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("docs/*.md")]
    text = "\n".join(path.read_text() for path in files)
    references = parsed("CITATION.cff")["references"]
    cited = [(reference["authors"][0]["family-names"], reference["year"]) for reference in references]
    for author, year in [*cited, ("Nobody", 2000)]:
        found = re.search(rf"\b{author}\b(.|\n){{0,120}}\b{year}\b", text) is not None
        assert found == (author != "Nobody"), f"{author} {year} is cited, but nothing builds on it"


def test_pre_commit_has_the_linter_that_make_has():
    (pinned,) = re.findall(r"^ruff==.+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # fetches nothing but the linter
    commands = [hook["entry"].split()[:2] for hook in repository["hooks"]]
    assert commands == [["ruff", "check"], ["ruff", "format"]]
    assert [hook["additional_dependencies"] for hook in repository["hooks"]] == [[pinned]] * 2


def test_the_workflow_tests_every_python_and_publishes_nothing():
    workflow = parsed(".github/workflows/ci.yml")
    jobs, tests = workflow["jobs"], workflow["jobs"]["tests"]
    pythons = in_project('^    "Programming Language :: Python :: (3\\..+)",$')
    assert tests["strategy"]["matrix"]["python"] == pythons
    assert tests["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job and job["timeout-minutes"] <= 150 for job in jobs.values())
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = {step["uses"].partition("@")[0] for step in steps if "uses" in step}
    assert used == {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
    commands = [step["run"] for step in steps if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands:
        assert command == ".ci/run" or set(command.removeprefix("make ").split()) <= set(targets)
