"""The options of a training, which the demo and the accuracy benchmark share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.averaging import check_name
from gradcomp.command_line import positive_int

MIN_STEPS = 10  # fewer leave no step to time after the plain ones


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **defaults: Any
) -> argparse.Namespace:
    """Parse the arguments of a program, with other defaults; end it with a clear message if they don't fit.

    parser: has the program's own options.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "comma-separated; the others are compared with the first (default: %(default)s)"
    parser.add_argument("--hook", help=text)
    for name, text in (
        ("steps", f"optimizer steps per hook, at least {MIN_STEPS}"),
        ("width", "width of the GPT, a multiple of --heads"),
        ("layers", "its transformer blocks"),
        ("heads", "its attention heads"),
        ("batch", "sequences per rank and step"),
        ("sequence", "bytes per sequence"),
        ("ranks", "processes"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=positive_int, metavar="N", help=help_text)
    text = "of weights and data (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: %(default)s)")
    parser.set_defaults(heads=4, sequence=64, **defaults)
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS} to time any of them: got {options.steps}")
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads: got {options.width} and {options.heads}")
    if options.seed < 0:
        parser.error(f"--seed must not be negative: got {options.seed}")
    options.hooks = options.hook.split(",")
    for hook in options.hooks:
        try:
            check_name(split_rate(hook)[0])
        except ValueError as error:
            parser.error(f"--hook: {error}")
    return options


def split_rate(name: str) -> tuple[str, float | None]:
    """Return a hook's name without ":lr=..." at its end, and that learning rate."""
    name, has_rate, rate = name.partition(":lr=")
    return name, float(rate) if has_rate else None
