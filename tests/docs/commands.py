"""Check a documented command without running it: its program exists, and takes these arguments."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from gradcomp.bench import bench_parser
from gradcomp.plan import plan_parser

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"plan": plan_parser, "bench": bench_parser}
# Commands of the machine, not of this project: these are not checked.
FOREIGN = {"git", "cd", "torchft_lighthouse"}


def problem_of(command: str) -> str | None:
    """Return the problem of a line in a shell block; None for a correct line or a comment."""
    words = re.sub(r"^([A-Z_]+=\S* +)+", "", command.strip())
    program, *arguments = shlex.split(words, comments=True) or [""]
    if not program or program in FOREIGN:
        return None
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        names = [each for each in arguments if "=" not in each]
        unknown = [name for name in names if name not in targets]
        return f"the Makefile has no {unknown}" if unknown or not names else None
    if program == "torchrun":
        # Every option except --standalone has a value.
        while arguments and arguments[0].startswith("--"):
            del arguments[: 1 if arguments[0] == "--standalone" or "=" in arguments[0] else 2]
    if program in {"python", "python3", "torchrun"}:
        return _problem_of_python(arguments)
    if [program, *arguments[:1]] == ["pip", "install"]:
        extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
        known = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
        own = [re.fullmatch(r"(?:\.|gradcomp)\[([\w,]+)\]", argument) for argument in arguments]
        unknown = [found[1] for found in own if found and not known.issuperset(found[1].split(","))]
        return f"pyproject.toml has no extra {unknown[0]}" if unknown else None
    return f"{program!r} is no command that is known here"


def _problem_of_python(arguments: Sequence[str]) -> str | None:
    if arguments[:1] != ["-m"]:
        is_file = arguments and (ROOT / arguments[0]).is_file()
        return None if is_file else f"there is no file {arguments[:1]}"
    module, *rest = arguments[1:]
    if importlib.util.find_spec(module) is None:
        return f"there is no module {module}"
    if module != "gradcomp" or not rest:
        return None
    if rest[0] not in PARSERS:
        return f"python -m gradcomp has no command {rest[0]}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            PARSERS[rest[0]]().parse_args(rest[1:])
    except SystemExit:
        return said.getvalue().strip()
    return None
