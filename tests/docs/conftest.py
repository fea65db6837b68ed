"""Build the documentation site once for all tests, as `make docs` does."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 240


@dataclass(frozen=True)
class Site:
    folder: Path
    exit_status: int
    output: str  # of the build, warnings included

    @property
    def pages(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*.html") if path.name != "404.html")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return the site; the first of pytest-xdist's processes that needs it builds it."""
    if sys.version_info < (3, 11):
        pytest.skip("the site's tools need Python 3.11")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    result = shared / "site.json"
    with locked(shared / "site.lock"):
        if not result.exists():
            result.write_text(json.dumps(build(shared / "site")))
    exit_status, output = json.loads(result.read_text())
    return Site(shared / "site", exit_status, output)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)], cwd=ROOT, text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout
