"""Divide tests among processes that run at once: pytest -p tests.claimed --claims FOLDER.

Every process collects all tests. A test runs in the first process that claims it, by making a file in FOLDER.
So a process that has long tests runs fewer, as with pytest-xdist, which a bare machine lacks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, required=True, metavar="FOLDER", help="where tests are claimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests that this process claims; otherwise as pytest does."""
    if session.config.option.collectonly:
        return None
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    folder: Path = session.config.getoption("claims")
    claimed = (item for item in session.items if is_claimed(folder, item.nodeid))
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)  # fixtures that it shares with the item stay
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
        item = following
    return True


def is_claimed(folder: Path, test: str) -> bool:
    """Claim a test. Returns False if it is claimed already, by any process."""
    try:
        (folder / hashlib.sha256(test.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
