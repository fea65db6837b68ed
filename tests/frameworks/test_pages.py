"""Run the Python blocks of docs/frameworks on two processes, or find their lines in the recipe that runs."""

import pytest

from tests.docs.code_blocks import ROOT, blocks_in
from tests.frameworks.recipes import EXAMPLES, IN_FRAMEWORKS, IN_RECIPES, PAGES, run
from tests.programs import TORCHRUN


@pytest.mark.parametrize("page", IN_FRAMEWORKS)
def test_blocks_run(page, tmp_path):
    printed, _ = run(*TORCHRUN, ROOT / "tests/frameworks/documented.py", tmp_path, page, folder=tmp_path)
    assert printed.count("all blocks have run") == 2


@pytest.mark.parametrize("page", IN_RECIPES)
def test_lines_are_the_recipes(page):
    text = (ROOT / "docs" / "frameworks" / f"{page}.md").read_text()
    recipe = {line.strip() for line in (EXAMPLES / PAGES[f"frameworks/{page}.md"]).read_text().splitlines()}
    blocks = [block for block in blocks_in(text, page) if block.language == "python"]
    assert blocks
    for block in blocks:
        assert {line.strip() for line in block.source.splitlines()} <= recipe | {""}
