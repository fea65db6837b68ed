"""Every documented code block runs, is a command that exists, or stands in a table with its reason."""

import itertools

import pytest

from tests.docs import running
from tests.docs.code_blocks import ROOT, all_blocks, blocks_in
from tests.docs.commands import problem_of

BLOCKS = all_blocks()
PYTHON = [block for block in BLOCKS if block.language == "python"]
OTHERS = [block for block in BLOCKS if block.language != "python"]
WITHOUT_GROUP = [block for block in PYTHON if block.key in running.WITHOUT_GROUP]
IN_RANKS = [
    block
    for block in PYTHON
    if block.key not in running.WITHOUT_GROUP and block.key not in running.RUN_ELSEWHERE
]

# Blocks that are neither Python nor commands: page, and start of the first line.
NOT_RUN = [
    # What the command above prints.
    ("docs/accuracy.md", "gpt: 136,960 parameters"),
    ("docs/auto.md", "gradcomp: auto_hook uses"),
    ("docs/others_hooks.md", ""),  # see test_others_hooks.py
    ("docs/plan.md", "model    335,141,888"),
    ("docs/recording.md", "gradcomp: PowerSGD compresses"),
    ("docs/testing.md", "top_k_hook"),
    ("docs/testing.md", "unbiased fails for"),
    ("docs/testing.md", "gradients      hook"),
    # Pictures in characters.
    ("docs/architecture.md", "kernels/       Triton kernels"),
    ("docs/architecture.md", "__init__ ──▶ parallel"),
    ("docs/fsdp.md", "disable_fsdp_gradient_division(model)"),  # a patch of torchtitan, tried by hand
]


def test_documented_python_runs_on_two_ranks(run_ranks, tmp_path):
    assert {"README.md", "docs/hooks.md", "docs/powersgd.md"} <= {block.page for block in IN_RANKS}
    run_ranks(running.run_in_rank, 2, IN_RANKS, str(tmp_path), timeout_s=240)


@pytest.mark.usefixtures("plain_torch")
def test_documented_python_that_needs_no_group_runs():
    for _, blocks in itertools.groupby(WITHOUT_GROUP, key=lambda block: block.page):
        running.run_without_group(list(blocks))


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: f"{block.page}:{block.line}")
def test_other_blocks_are_commands_that_exist(block):
    if any(block.page == page and block.first_line.startswith(start) for page, start in NOT_RUN):
        return
    commands = block.source.replace("\\\n", " ").splitlines()
    assert any(command.strip() for command in commands)
    for command in commands:
        assert problem_of(command) is None, f"{block.page}:{block.line}: {command}"


def test_the_tables_name_blocks_that_there_are():
    keys = {block.key for block in PYTHON}
    for table in ("BEFORE", "AFTER", "INSTEAD", "WITHOUT_GROUP", "RUN_ELSEWHERE"):
        assert set(getattr(running, table)) <= keys, table
    for page, beginning in NOT_RUN:
        assert any(b.page == page and b.first_line.startswith(beginning) for b in OTHERS), beginning
    for (page, _), test in running.RUN_ELSEWHERE.items():
        assert page.removeprefix("docs/") in (ROOT / test).read_text()


def test_blocks_are_found_as_they_stand():
    text = "a\n```python\nx = 1\n\ny = 2\n```\n- b\n    ```\n    make\n    ```\n"
    text += "````text\n```\n````\n```python\nz\n```\n"
    assert [(b.key[1], b.line, b.language, b.source) for b in blocks_in(text, "p.md")] == [
        (0, 3, "python", "x = 1\n\ny = 2\n"),
        (0, 9, "", "make\n"),
        (0, 12, "text", "```\n"),
        (1, 15, "python", "z\n"),
    ]
    with pytest.raises(ValueError, match=r"p\.md:2: the code block is not closed"):
        blocks_in("\n```\nmake\n", "p.md")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nothing", "the Makefile has no"),
        ("python nothing.py", "there is no file"),
        ("python -m gradcomp.nothing", "there is no module"),
        ("python -m gradcomp nothing", "has no command nothing"),
        ("python -m gradcomp plan --model a:b --nothing", "unrecognized arguments: --nothing"),
        ("torchrun --nproc-per-node 2 -m gradcomp bench --rounds many", "argument --rounds"),
        ("pip install '.[nothing]'", "has no extra nothing"),
        ("Times are PREDICTED", "is no command"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command, problem):
    assert problem in problem_of(command)
