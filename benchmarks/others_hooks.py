"""Check other projects' DDP hooks with gradcomp.testing: python -m benchmarks.others_hooks --help

benchmarks/results/others_hooks.md has the tables, docs/others_hooks.md explains the failures.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe
from benchmarks.kit_verdicts import MARKS
from benchmarks.records import RESULTS, Row, append, read
from gradcomp.comm.bucket import Hook
from gradcomp.testing import Report, check_hook
from gradcomp.testing.run import MakeState

RECORDS = RESULTS / "others_hooks.jsonl"
START = 2  # plain steps before a state compresses


@dataclass(frozen=True)
class Subject:
    """A hook under its project's name, and the function that makes its state."""

    name: str
    hook: Hook
    make_state: MakeState = None


def torchs() -> list[Subject]:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        debugging_hooks,
        default_hooks,
        post_localSGD_hook,
        quantization_hooks,
    )
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as module

    def rank(number: int) -> MakeState:
        return partial(module.PowerSGDState, matrix_approximation_rank=number, start_powerSGD_iter=START)

    def local_sgd(group: Any) -> Any:
        return post_localSGD_hook.PostLocalSGDState(group, subgroup=group, start_localSGD_iter=START)

    return [
        *(Subject(name, getattr(default_hooks, name)) for name in ("allreduce_hook", "fp16_compress_hook")),
        Subject("bf16_compress_hook", default_hooks.bf16_compress_hook),
        Subject("powerSGD_hook, r = 1", module.powerSGD_hook, rank(1)),
        Subject("powerSGD_hook, r = 4", module.powerSGD_hook, rank(4)),
        *(
            Subject(f"{bits}_compress_wrapper(powerSGD_hook), r = 1", wrapper(module.powerSGD_hook), rank(1))
            for bits, wrapper in (
                ("fp16", default_hooks.fp16_compress_wrapper),
                ("bf16", default_hooks.bf16_compress_wrapper),
            )
        ),
        Subject("batched_powerSGD_hook, r = 1", module.batched_powerSGD_hook, rank(1)),
        Subject("quantization_pertensor_hook", quantization_hooks.quantization_pertensor_hook),
        Subject("quantization_perchannel_hook", quantization_hooks.quantization_perchannel_hook),
        Subject("post_localSGD_hook, one subgroup", post_localSGD_hook.post_localSGD_hook, local_sgd),
        Subject("noop_hook", debugging_hooks.noop_hook),
    ]


def colossalais() -> list[Subject]:
    from colossalai.quantization import fp8  # type: ignore[import-not-found]

    return [
        Subject("fp8_compress_ddp_grad_comm_hook_async", fp8.fp8_compress_ddp_grad_comm_hook_async),
        Subject("fp8_compress_ddp_grad_comm_hook_sync", fp8.fp8_compress_ddp_grad_comm_hook_sync),
    ]


PROJECTS: dict[str, Callable[[], list[Subject]]] = {"torch": torchs, "colossalai": colossalais}


def first_line(message: str) -> str:
    """Return a message's first line. The other lines, a traceback, name files of this machine."""
    return re.sub(r"\x1b\[\d*m", "", message.splitlines()[0])[:300]


def rows_of(report: Report, project: str, subject: Subject) -> list[Row]:
    """Return a row per property: the verdict, and the counter-example if the property fails."""
    failures = {failure.property: failure for failure in report.failures}
    rows = []
    for name, verdict in report.verdicts.items():
        failure = failures.get(name)
        rows.append(
            {
                "project": project,
                "version": metadata.version(project),
                "hook": subject.name,
                "property": name,
                "outcome": verdict.outcome,
                "measured": verdict.measured,
                "num_examples": verdict.num_examples,
                "num_passed_over": verdict.num_passed_over,
                "note": verdict.note,
                "counterexample": failure and repr(failure.counterexample),
                "message": failure and first_line(failure.message),
            }
        )
    return rows


def record(rows: Sequence[Row], path: Path) -> None:
    """Write rows. Each replaces the row of equal project, hook and property; other rows stay."""

    def key(row: Row) -> tuple[str, ...]:
        return row["project"], row["hook"], row["property"]

    new = {key(row): row for row in rows}
    kept = [row for row in read(path) if key(row) not in new] if path.exists() else []
    path.unlink(missing_ok=True)
    append(path, (*kept, *rows))


def table(rows: Iterable[Row]) -> str:
    """Format verdicts as a Markdown table, a row per hook and a column per property."""
    verdicts: dict[str, dict[str, str]] = {}
    for row in rows:
        measured = "" if row["measured"] is None else f" {row['measured']:.1g}"
        verdicts.setdefault(row["hook"], {})[row["property"]] = MARKS[row["outcome"]] + measured
    properties = list(dict.fromkeys(name for marks in verdicts.values() for name in marks))
    lines = [["", *(f"`{name}`" for name in verdicts)], ["---"] * (1 + len(verdicts))]
    lines += [[name, *(marks.get(name, "") for marks in verdicts.values())] for name in properties]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    environment = describe(torch.device("cpu"))
    for project in options.projects or PROJECTS:
        try:
            subjects = PROJECTS[project]()
        except ImportError as error:
            print(f"### {project}\n\nskipped: {error}\n")
            continue
        rows: list[Row] = []
        for subject in subjects:
            if options.hook and subject.name not in options.hook:
                continue
            began = time.perf_counter()
            report = check_hook(
                subject.hook,
                subject.make_state,
                world_size=options.world_size,
                max_examples=options.max_examples,
                only=options.only,
            )
            outcomes = [verdict.outcome for verdict in report.verdicts.values()]
            counts = ", ".join(f"{outcomes.count(mark)} {mark}" for mark in MARKS if mark in outcomes)
            print(f"{project}: {subject.name}: {counts} ({time.perf_counter() - began:.0f} s)", flush=True)
            checked = {"world_size": options.world_size, "max_examples": options.max_examples}
            found = [{**environment, **checked, **row} for row in rows_of(report, project, subject)]
            if options.record:
                record(found, options.record)
            rows += found
            for failure in report.failures:
                print(f"  {failure}\n", flush=True)
        print(f"\n### {project} {metadata.version(project)}\n\n{table(rows)}\n", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.others_hooks",
        description="Check hooks of torch, and of colossalai where it is installed, on simulated ranks; "
        "print the verdicts as Markdown.",
    )
    parser.add_argument(
        "projects", nargs="*", type=_project, metavar="PROJECT", help=f"{', '.join(PROJECTS)} (default: all)"
    )
    parser.add_argument("--hook", action="append", help="check this hook only; can be given several times")
    parser.add_argument("--only", action="append", default=[], metavar="PROPERTY", help="check it only")
    parser.add_argument("--max-examples", type=int, default=25, help="workloads per property (default: 25)")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--record", nargs="?", type=Path, const=RECORDS, metavar="FILE", help=f"write rows to {RECORDS.name}"
    )
    return parser


def _project(name: str) -> str:
    if name not in PROJECTS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(PROJECTS)}, got {name!r}")
    return name


if __name__ == "__main__":
    main()
