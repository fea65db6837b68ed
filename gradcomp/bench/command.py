"""The command `python -m gradcomp bench`: measure a cluster and a model's step with every hook."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from gradcomp.comm.nodes import AUTO
from gradcomp.command_line import OneLineParser, hooks_named, not_negative, positive, positive_int

from .group import STORE_VARIABLE, is_first_rank, join
from .run import measure, table
from .workloads import BUILT_IN_WORKLOADS

INTERRUPTED = 128 + signal.SIGINT
# So long rank 0 has to print why all ranks end. A launcher ends all of them when one has ended.
GRACE_S = 5.0


def run_locally(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `python -m gradcomp bench arguments` in num_ranks processes, which end when this process ends.

    Returns 0 if every process ends with 0, else the exit status of the first that doesn't.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        places = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, STORE_VARIABLE: f"{folder}/store"}
        try:
            spawn(_run_as, (list(arguments), places), num_ranks, daemon=True)
        except ProcessExitedException as error:
            # A process that signal n has killed has the status -n.
            return error.exit_code if error.exit_code >= 0 else 128 - error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
    return 0


def _run_as(rank: int, arguments: Sequence[str], places: Mapping[str, object]) -> None:
    """Run bench as one of run_locally's ranks. places: environment variables."""
    given = {"RANK": rank, "LOCAL_RANK": rank, **places}
    os.environ |= {name: str(value) for name, value in given.items()}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    main(arguments)


DEFAULT_HOOKS = "bf16,int8,int4,powersgd:4,powersgd:8:int8,powersgd:16:int8"
HOW_TO_START = (
    "start it with torchrun on every machine (torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
    "--rdzv-endpoint HOST:29400 -m gradcomp bench), or with --ranks N for N processes on this machine"
)


class BenchParser(OneLineParser):
    """A parser that prints its messages on rank 0 only."""

    def error(self, message: str) -> Any:
        if is_first_rank():
            super().error(message)
        time.sleep(GRACE_S)
        self.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = bench_parser()
    options = parser.parse_args(given)
    if options.out is not None and not os.access(options.out.absolute().parent, os.W_OK):
        parser.error(
            f"argument --out: {options.out} can't be written: {options.out.parent} is no such folder"
        )
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # set by torchrun, and by run_locally
        if options.ranks is None:
            parser.error(f"there is one process only; {HOW_TO_START}")
        sys.exit(run_locally(given, options.ranks))
    if STORE_VARIABLE not in os.environ and options.ranks is not None:
        parser.error("--ranks starts processes itself: leave it out under torchrun")
    try:
        _run_rank(parser, options)
    except KeyboardInterrupt:
        _end_interrupted()


def _end_interrupted() -> NoReturn:
    """End this rank without cleanup: collectives under way would wait for the other ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends another one
    if is_first_rank() and STORE_VARIABLE not in os.environ:
        print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def bench_parser() -> BenchParser:
    parser = BenchParser(
        prog="python -m gradcomp bench",
        description="Measure the links between ranks, and a training step with every hook. Print a "
        "table, and which hook to use.",
        epilog=f"{HOW_TO_START[0].upper()}{HOW_TO_START[1:]}.",
    )
    text = "Start N processes on this machine, without torchrun."
    parser.add_argument("--ranks", type=positive_int, metavar="N", help=text)
    text = "module:callable, which returns (module, inputs) or (module, inputs, loss function). Default: gpt."
    text = f"The model: {', '.join(BUILT_IN_WORKLOADS)}, or {text}"
    parser.add_argument("--model", default="gpt", help=text)
    text = "The hooks to measure, separated by commas. Default: %(default)s."
    parser.add_argument("--hook", type=hooks_named, default=DEFAULT_HOOKS, metavar="NAMES", help=text)
    text = "The time of steps with each hook. Default: 5."
    parser.add_argument("--seconds", type=positive, default=5.0, metavar="S", help=text)
    text = "DDP's option of this name. Default: 25."
    parser.add_argument("--bucket-cap-mb", type=positive, default=25.0, metavar="MB", help=text)
    text = (
        "The ranks of a node, which share its network cards. Default: torchrun's, if a node's ranks follow "
        "one another."
    )
    parser.add_argument("--ranks-per-node", type=positive_int, metavar="N", help=text)
    text = "Compute on the CPU and communicate with gloo, though there are GPUs."
    parser.add_argument("--cpu", action="store_true", help=text)
    text = "What a recommended hook may cost in loss on docs/accuracy.md's GPT. Default: %(default)s."
    parser.add_argument("--max-loss", type=not_negative, default=0.02, metavar="NATS", help=text)
    text = "Write the measurements as JSON."
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    return parser


def _run_rank(parser: BenchParser, options: Any) -> None:
    """Measure as one of the ranks."""
    # Hides what hooks log of their compression: the table has every hook's results.
    logging.getLogger("gradcomp").setLevel(logging.WARNING)
    try:
        group, workload = join(options.cpu, options.ranks_per_node or AUTO, options.model)
    except ValueError as error:
        parser.error(str(error))
    try:
        if group.world_size < 2:
            parser.error("one rank has nobody to communicate with: start two at least")
        found = measure(workload, group, options.hook, options.seconds, options.bucket_cap_mb)
        if group.rank == 0:
            print(table(found, options.max_loss))
            if options.out is not None:
                options.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
    except KeyboardInterrupt:
        _end_interrupted()
    finally:
        dist.destroy_process_group()
