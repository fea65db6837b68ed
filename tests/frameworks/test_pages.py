"""Find the lines of the Python blocks of docs/frameworks in the recipes and tests that run."""

import pytest

from tests.docs.code_blocks import ROOT, blocks_in
from tests.frameworks.recipes import EXAMPLES, IN_RECIPES, PAGES


@pytest.mark.parametrize("page", IN_RECIPES)
def test_lines_run(page):
    text = (ROOT / "docs" / "frameworks" / f"{page}.md").read_text()
    programs = EXAMPLES / PAGES[f"frameworks/{page}.md"], ROOT / "tests/frameworks/also_tested.py"
    run = {line.strip() for program in programs for line in program.read_text().splitlines()}
    blocks = [block for block in blocks_in(text, page) if block.language == "python"]
    assert blocks
    for block in blocks:
        assert {line.strip() for line in block.source.splitlines()} <= run | {""}
