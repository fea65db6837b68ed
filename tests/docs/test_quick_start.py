"""Paste the blocks of docs/quick_start.md at the end of its program, in order and as printed, and run it."""

import re

from tests.docs.code_blocks import ROOT, blocks_in
from tests.programs import TORCHRUN, run_python

PAGE = ROOT / "docs/quick_start.md"


def run(sources, folder):
    file = folder / "time_your_step.py"
    file.write_text("\n".join(sources))
    done = run_python(*TORCHRUN, str(file), cwd=folder, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_as_one_script(tmp_path):
    blocks = blocks_in(PAGE.read_text(), "docs/quick_start.md")
    program = (ROOT / "docs/examples/time_your_step.py").read_text()
    printed = run([program, *(block.source for block in blocks if block.language == "python")], tmp_path)
    assert re.match(r"\d+\.\d ms per step, \d+\.\d ms if communication were free\n", printed)
    assert re.search(r"step 30: \d\d?\.\d times fewer elements were sent", printed)
    assert (tmp_path / "checkpoint.pt").exists()
