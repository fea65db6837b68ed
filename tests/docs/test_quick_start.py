"""Paste the blocks of docs/quick_start.md into a file, in order and as printed, and run it."""

import re

from tests.docs.code_blocks import ROOT, blocks_in
from tests.programs import TORCHRUN, run_python

PAGE = ROOT / "docs" / "quick_start.md"  # quick_start.md


def run(blocks, folder):
    file = folder / "time_your_step.py"
    file.write_text("\n".join(block.source for block in blocks))
    done = run_python(*TORCHRUN, str(file), cwd=folder, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_as_one_script(tmp_path):
    blocks = [
        block for block in blocks_in(PAGE.read_text(), "docs/quick_start.md") if block.language == "python"
    ]
    assert blocks[0].source == (ROOT / "docs/examples/time_your_step.py").read_text()
    timed = r"\d+\.\d ms per step, \d+\.\d ms if communication were free\n"
    assert re.fullmatch(timed, run(blocks[:1], tmp_path))
    printed = run(blocks, tmp_path)
    assert re.match(timed, printed)
    assert re.search(r"step 30: \d\d?\.\d times fewer elements were sent", printed)
    assert (tmp_path / "checkpoint.pt").exists()
