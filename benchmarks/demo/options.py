"""The options that the launcher and the training script share."""

import argparse

from gradcomp.command_line import positive_int

MIN_STEPS = 10  # fewer leave no step to time after the plain ones
REDUCERS = ("torch", "gradcomp")  # what averages gradients during backward: torch's DDP, or our Reducer


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training, which are the same for every hook."""
    group = parser.add_argument_group("training")
    for name, default, text in (
        ("steps", 400, f"optimizer steps per hook, at least {MIN_STEPS}"),
        ("width", 128, "width of the GPT, a multiple of --heads"),
        ("layers", 4, "its transformer blocks"),
        ("heads", 4, "its attention heads"),
        ("batch", 4, "sequences per rank and step"),
        ("sequence", 64, "bytes per sequence"),
        ("powersgd-rank", 8, "rank of PowerSGD's factors"),
    ):
        help_text = f"{text} (default: %(default)s)"
        group.add_argument(f"--{name}", type=positive_int, default=default, metavar="N", help=help_text)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights and data (default: %(default)s)"
    )
    text = "what averages: torch's DistributedDataParallel or gradcomp's Reducer (default: %(default)s)"
    group.add_argument("--reducer", choices=REDUCERS, default="torch", help=text)


def check_training_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a clear message if the options do not fit together."""
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS} to time any of them: got {options.steps}")
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads: got {options.width} and {options.heads}")
    if options.seed < 0:
        parser.error(f"--seed must not be negative: got {options.seed}")
