"""Find the fenced code blocks of the README, CONTRIBUTING.md and the pages of docs/."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")


@dataclass(frozen=True)
class Block:
    page: str  # relative to the checkout
    number: int  # among the page's blocks of this language, from 0
    line: int  # of its first line of code, from 1
    language: str  # "" without one
    source: str

    @property
    def key(self) -> tuple[str, int]:
        return self.page, self.number

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in self.source.splitlines() if line.strip()), "")


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the blocks of a page, in order, without the indentation of their fences.

    Raises ValueError for a block that isn't closed.
    """
    blocks: list[Block] = []
    numbers: Counter[str] = Counter()
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        opening = _OPENING.match(line)
        if not opening:
            continue
        source = []
        for _, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            source.append(inner.removeprefix(opening["indent"]))
        else:
            raise ValueError(f"{page}:{number}: the code block is not closed")
        language = opening["language"]
        blocks.append(Block(page, numbers[language], number + 1, language, "\n".join(source) + "\n"))
        numbers[language] += 1
    return blocks


def all_blocks() -> list[Block]:
    return [
        block for path in PAGES for block in blocks_in(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
