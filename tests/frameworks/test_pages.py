"""Run the Python blocks of docs/frameworks on two processes, or find their lines in the recipe that runs."""

import re

import pytest

from tests.docs.code_blocks import ROOT, blocks_in
from tests.frameworks.recipes import EXAMPLES, PAGES, run
from tests.programs import TORCHRUN

TOGETHER = [
    ("accelerate",),
    ("fabric",),
    ("lightning",),
    ("transformers",),
    ("torchrun", "zero_redundancy", "local_steps", "torch_compile"),
]
# Blocks of these pages need code that only the recipe has.
IN_RECIPES = ["mixed_precision", "ray", "torchft"]


@pytest.mark.parametrize("pages", TOGETHER, ids=", ".join)
def test_blocks_run(pages, tmp_path):
    printed, _ = run(*TORCHRUN, ROOT / "tests/frameworks/documented.py", tmp_path, *pages, folder=tmp_path)
    assert printed.count("all blocks have run") == 2


@pytest.mark.parametrize("page", IN_RECIPES)
def test_lines_are_the_recipes(page):
    text = (ROOT / "docs" / "frameworks" / f"{page}.md").read_text()
    recipe = {line.strip() for line in (EXAMPLES / PAGES[f"frameworks/{page}.md"]).read_text().splitlines()}
    blocks = [block for block in blocks_in(text, page) if block.language == "python"]
    assert blocks
    for block in blocks:
        assert {line.strip() for line in block.source.splitlines()} <= recipe | {""}


def test_no_page_is_left_out():
    pages = {re.sub(r"frameworks/|\.md", "", page) for page in PAGES}
    assert pages == {page for together in TOGETHER for page in together} | set(IN_RECIPES)
