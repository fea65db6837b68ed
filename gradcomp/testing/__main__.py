"""Check a hook from the command line: python -m gradcomp.testing my_hooks:top_k_hook my_hooks:TopKState"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradcomp.command_line import OneLineParser, find_callable, positive_int
from gradcomp.testing.check import PROPERTIES, check_hook

DTYPES = ("float32", "float64", "float16", "bfloat16")


def _named(text: str) -> Callable[..., Any]:
    try:
        return find_callable(text, "name")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print check_hook's report; return 1 if a property fails."""
    description = "Check a communication hook's properties on simulated ranks, and print the report."
    parser = OneLineParser(prog="python -m gradcomp.testing", description=description)
    parser.add_argument("hook", type=_named, help="the hook, as module:name")
    text = "the function or class that makes a rank's state from its process group, as module:name"
    parser.add_argument("make_state", type=_named, nargs="?", help=text)
    text = "number of ranks (default: 2 and 3, and 4 and 5 in some workloads)"
    parser.add_argument("--world-size", type=positive_int, metavar="W", help=text)
    text = "workloads drawn for each property (default: 25)"
    parser.add_argument("--examples", type=positive_int, default=25, metavar="N", help=text)
    text = "a dtype of the gradients; can be given several times (default: float32, float64)"
    parser.add_argument("--dtype", action="append", choices=DTYPES, metavar="DTYPE", help=text)
    names = [each.name for each in PROPERTIES]
    text = f"check this property only; can be given several times: {', '.join(names)}"
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="PROPERTY", help=text)
    parser.add_argument("--no-processes", action="store_true", help="leave out the run in real processes")
    options = parser.parse_args(arguments)
    report = check_hook(
        options.hook,
        options.make_state,
        world_size=options.world_size,
        max_examples=options.examples,
        dtypes=[getattr(torch, name) for name in options.dtype or ("float32", "float64")],
        only=options.only,
        processes=not options.no_processes,
    )
    print(report)
    return not report.ok


if __name__ == "__main__":
    sys.exit(main())
