"""Check a hook from the command line: python -m gradcomp.testing my_hooks:top_k_hook my_hooks:TopKState"""

import argparse
import ast
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradcomp.command_line import OneLineParser, find_callable, positive_int
from gradcomp.testing import properties
from gradcomp.testing.check import check_hook
from gradcomp.testing.claims import claims_of
from gradcomp.testing.comparison import compare
from gradcomp.testing.ranks import RankError

DTYPES = ("float32", "float64", "float16", "bfloat16")


def _compared(text: str) -> tuple[str, Any, Any]:
    hook, _, make_state = text.partition(",")
    return text, find_callable(hook, "hook"), find_callable(make_state, "state") if make_state else None


def _claim(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return name, dtype if isinstance(dtype, torch.dtype) else ast.literal_eval(value)
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as contraction=0.1") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print check_hook's report, and return 1 if a property fails; or print compare's table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    description = "Check a communication hook's properties on simulated ranks, and print the report."
    epilog = "python -m gradcomp.testing compare --help: a table of several hooks' errors and bytes"
    parser = OneLineParser(prog="python -m gradcomp.testing", description=description, epilog=epilog)
    parser.add_argument("hook", help="the hook, as module:name")
    text = "the function or class that makes a rank's state from its process group, as module:name"
    parser.add_argument("make_state", nargs="?", help=text)
    number = partial(parser.add_argument, type=positive_int)
    text = "number of ranks (default: 2 and 3, and 1, 4, 5 and 16 in some workloads)"
    number("--world-size", metavar="W", help=text)
    text = "workloads drawn for each property (default: 25)"
    number("--examples", dest="max_examples", default=25, metavar="N", help=text)
    text = "a dtype of the gradients; can be given several times (default: float32, float64)"
    several = partial(parser.add_argument, action="append", default=[])
    several("--dtype", choices=DTYPES, dest="dtypes", metavar="DTYPE", help=text)
    text = f"check this property only; can be given several times: {', '.join(properties.__all__)}"
    several("--only", choices=properties.__all__, metavar="PROPERTY", help=text)
    text = "change a claim; can be given several times"
    several("--claim", type=_claim, dest="claims", default=None, metavar="NAME=VALUE", help=text)
    text = "simulated ranks, or processes on gloo (default: simulated)"
    parser.add_argument("--ranks", choices=("simulated", "gloo"), default="simulated", help=text)
    text = "leave out the run in real processes"
    parser.add_argument("--no-processes", action="store_false", dest="processes", help=text)
    parser.add_argument("--fail-fast", action="store_true", help="end at the first property that fails")
    parser.add_argument("--device", default="cpu", help="the gradients' device (default: cpu)")
    options = parser.parse_args(arguments)
    try:
        torch.zeros(1, dtype=torch.int64, device=options.device).tolist()
    except (AssertionError, RuntimeError) as error:
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")
    options.dtypes = [getattr(torch, name) for name in options.dtypes] or None
    try:
        options.hook = find_callable(options.hook, "hook")
        options.make_state = options.make_state and find_callable(options.make_state, "state")
        if options.claims:
            claims = claims_of(options.hook, options.make_state, options.device, options.ranks)
            options.claims = replace(claims, **dict(options.claims))
        report = check_hook(**vars(options))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(report)
    return not report.ok


def _compare(arguments: Sequence[str]) -> int:
    description = "Compare hooks' errors and bytes on simulated ranks and gradients of several spectra."
    parser = OneLineParser(prog="python -m gradcomp.testing compare", description=description)
    text = "a hook as module:name, or module:name,module:name with the maker of its state"
    parser.add_argument("hooks", nargs="+", metavar="HOOK", help=text)
    parser.add_argument("--steps", type=positive_int, default=32, help="number of steps (default: 32)")
    parser.add_argument("--world-size", type=positive_int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument(
        "--plot", metavar="FILE", help="also draw a picture, for example a PNG; needs matplotlib"
    )
    options = parser.parse_args(arguments)
    try:
        hooks = [_compared(text) for text in options.hooks]
        table = compare(hooks, steps=options.steps, world_size=options.world_size)
        print(table.csv() if options.csv else table)
        if options.plot:
            table.plot(options.plot)
    except RankError as error:
        parser.error(f"{str(error).splitlines()[0]}; does a hook lack its state, or start after --steps?")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
