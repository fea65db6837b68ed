"""The size of the house. A commit may lower a number here, never raise one: pay for additions first."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ("gradcomp/**/*.py", "kernels/**/*.py")  # pathlib doesn't follow the link gradcomp/kernels
PAGES = ("README.md", "CHANGELOG.md", "docs/**/*.md")


def files_of(*patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def num_lines(*patterns: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files_of(*patterns))


@pytest.mark.parametrize(
    ("what", "count", "limit"),
    [
        ("lines of gradcomp and kernels", lambda: num_lines(*LIBRARY), 21_549),
        ("files of gradcomp and kernels", lambda: len(files_of(*LIBRARY)), 108),
        ("lines of kernels", lambda: num_lines("kernels/**/*.py"), 3_003),
        ("lines of benchmarks", lambda: num_lines("benchmarks/**/*.py"), 4_992),
        ("lines of tests", lambda: num_lines("tests/**/*.py"), 32_720),
        (
            "words of README, changelog and docs",
            lambda: sum(len(page.read_text().split()) for page in files_of(*PAGES)),
            22_272,
        ),
        ("lines of README", lambda: num_lines("README.md"), 110),
    ],
)
def test_the_house_only_shrinks(what, count, limit):
    assert 0 < count() <= limit, f"{count()} {what}, at most {limit}: take out first, then add"
