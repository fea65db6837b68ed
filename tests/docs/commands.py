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
from gradcomp.plan.command import plan_parser

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"plan": plan_parser, "bench": bench_parser}
# Commands of the machine, not of this project: these are not checked.
FOREIGN = {"git", "cd", "torchft_lighthouse"}


def problem_of(command: str) -> str | None:
    """Return the problem of a line in a shell block; None for a correct line or a comment."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words or words[0] in FOREIGN:
        return None
    program, arguments = words[0], words[1:]
    if program == "make":
        return _problem_of_make(arguments)
    if program in {"python", "python3"}:
        return _problem_of_python(arguments)
    if program == "torchrun":
        return _problem_of_python(_without_torchruns_options(arguments))
    if program == "pip" and arguments[:1] == ["install"]:
        return _problem_of_pip(arguments[1:])
    return f"{program!r} is no command that is known here"


def _problem_of_make(arguments: Sequence[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    names = [each for each in arguments if "=" not in each]
    unknown = [name for name in names if name not in targets]
    return f"the Makefile has no {unknown}" if unknown or not names else None


def _problem_of_python(arguments: Sequence[str]) -> str | None:
    if arguments[:1] != ["-m"]:
        if not arguments or not (ROOT / arguments[0]).is_file():
            return f"there is no file {arguments[:1]}"
        return None
    module, rest = arguments[1], list(arguments[2:])
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


def _without_torchruns_options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments after torchrun's options; every option except --standalone has a value."""
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        rest = rest[1 if rest[0] == "--standalone" or "=" in rest[0] else 2 :]
    return rest


def _problem_of_pip(arguments: Sequence[str]) -> str | None:
    project = (ROOT / "pyproject.toml").read_text()
    known = set(re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE))
    for argument in arguments:
        own = re.fullmatch(r"(?:\.|gradcomp)\[([\w,]+)\]", argument)
        if own and not known.issuperset(own[1].split(",")):
            return f"pyproject.toml has no extra {own[1]}"
    return None
