"""Divide tests among processes that run at once: pytest -p tests.claimed --claims FOLDER --outcomes FILE.

Every process collects all tests. A test runs in the first process that claims it, by making a file in FOLDER.
So a process that has long tests runs fewer, as with pytest-xdist, which a bare machine lacks.

FILE gets a line for every collected test and one when it ends (benchmarks/outcomes.py), so that it tells what
has passed, failed and not run even if the processes are killed. Outcomes are printed as they come, and
nothing else: the processes may share their output.

A kernel that accesses memory out of bounds makes CUDA unusable in its process. The process then starts again,
for the tests that nobody has claimed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, required=True, metavar="FOLDER", help="where tests are claimed")
    parser.addoption("--outcomes", type=Path, required=True, metavar="FILE", help="where outcomes are noted")
    parser.addoption("--every", type=int, default=1, metavar="N", help="run every Nth test only")


def pytest_configure(config: pytest.Config) -> None:
    config.option.verbose, config.option.no_header, config.option.no_summary = -2, True, True
    config.pluginmanager.register(Noting(config.getoption("outcomes")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = items[:: config.getoption("every")]


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str]:
    return report.outcome, "", ""  # no dots


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests that this process claims; otherwise as pytest does."""
    if session.config.option.collectonly:
        return None
    claims = Claims(session.config.getoption("claims"))
    if claims.claim("the list of tests"):
        outcomes.plan(session.config.getoption("outcomes"), [item.nodeid for item in session.items])
    claimed = (item for item in session.items if claims.claim(item.nodeid))
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)  # fixtures that it shares with the item stay
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if cuda_is_lost():
            if following is not None:
                claims.drop(following.nodeid)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        item = following
    return True


class Claims:
    """Claims of tests, as files in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def _file(self, test: str) -> Path:
        return self._folder / hashlib.sha256(test.encode()).hexdigest()

    def claim(self, test: str) -> bool:
        """Claim a test. Returns False if it is claimed already, by any process."""
        try:
            self._file(test).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def drop(self, test: str) -> None:
        self._file(test).unlink()


def cuda_is_lost() -> bool:
    """Return whether a kernel's fault has left CUDA unusable in this process."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


class Noting:
    """Notes outcomes as they come, and prints them, with what pytest says of a failure."""

    def __init__(self, path: Path):
        self._path, self._reports = path, []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid, outcomes.FAILED, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if report.when == "teardown":
            # The first phase that did not pass, or else the call.
            told = next((each for each in self._reports if not each.passed), self._reports[1])
            self._note(report.nodeid, told.outcome, told, sum(each.duration for each in self._reports))
            self._reports = []

    def _note(
        self, name: str, outcome: str, report: pytest.TestReport | pytest.CollectReport, seconds: float = 0.0
    ) -> None:
        error = {}
        properties = "".join(f", {key}: {value}" for key, value in getattr(report, "user_properties", ()))
        text = f"{outcome:<7}{seconds:>7.1f} s  {name}{properties}\n"
        if outcome == outcomes.FAILED:
            text += f"{report.longreprtext}\n" + "".join(f"-- {a} --\n{b}\n" for a, b in report.sections)
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = report.longreprtext.splitlines()
            error["error"] = crash.message.partition("\n")[0] if crash else lines[-1]
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), text.encode())
        outcomes.note(self._path, name, outcome, **error)
