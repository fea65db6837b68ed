"""auto_hook over throttled links: the hook that it chooses, and its step compared with every fixed hook.

Job "auto" trains with auto_hook until its trial is over. Then steps of auto_hook, of each of its candidates
and of a hook that only averages take turns, each on a model of its own. Job "change" goes on with that
training after the link's rate has changed, and tells when auto_hook notices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLORS, picture
from gradcomp.hooks.auto_hook import CANDIDATES, AutoState, auto_hook
from gradcomp.hooks.named_hooks import HIERARCHICAL

from .report import FLAT, Row, label_axes, of, places

# A hook that does what DDP does without one: what any hook costs.
PLAIN_HOOK = "allreduce"
ROUNDS, STEPS = 5, 3  # the turns of a hook, and its timed steps in each; one step before them isn't timed
MAX_TRIAL_STEPS = 400

_kept: list[tuple[Any, AutoState]] = []  # of the last "auto" job, for "change"


def auto(job: dict[str, Any], new_trainer: Any) -> dict[str, Any]:
    """Return the choice, the trial's table and steps, and by hook the median ms of a step after it.

    new_trainer: called with (job, hook); returns a Trainer.
    """
    trainer, state = _trained(job, new_trainer)
    num_trial_steps = state.iter
    trainers = {"auto": trainer}
    for hook in job["fixed"]:
        trainers[hook] = new_trainer({**job, "hook": hook}, hook)
        for _ in range(4):  # plain steps, in which DDP rebuilds its buckets, and the first compressed one
            trainers[hook].step()
    times: dict[str, list[float]] = {hook: [] for hook in trainers}
    names = list(trainers)
    for number in range(ROUNDS):
        for hook in names[number:] + names[:number]:  # another one comes first in every round
            trainers[hook].step()
            times[hook] += [sum(trainers[hook].step()) for _ in range(STEPS)]
    medians = {hook: statistics.median(each) * 1e3 for hook, each in times.items()}
    return {
        "choice": state.choice,
        "table": state.table,
        "num_trial_steps": num_trial_steps,
        "step_ms": medians,
    }


def change(job: dict[str, Any]) -> dict[str, Any]:
    """Train on over another link. Returns the steps until a trial began and ended, and its choice."""
    ((trainer, state),) = _kept
    before, started, began = state.choice, time.perf_counter(), None
    for number in range(1, job["max_steps"] + 1):
        trainer.step()
        if began is None and state.choice is None:
            began = number
        if began is not None and state.choice is not None:
            break
    return {
        "before": before,
        "noticed_after": began,
        "chosen_after": number if began is not None and state.choice is not None else None,
        "choice": state.choice,
        "seconds": time.perf_counter() - started,
    }


def _trained(job: dict[str, Any], new_trainer: Any) -> tuple[Any, AutoState]:
    state = AutoState(random_seed=job.get("run", 0))
    trainer = new_trainer(job, None)
    trainer.model.register_comm_hook(state, auto_hook)
    _kept[:] = [(trainer, state)]
    while state.choice is None and state.iter < MAX_TRIAL_STEPS:
        trainer.step()
    return trainer, state


def summary(row: Row) -> str:
    """Say in one line what a row of job "auto" or "change" holds."""
    if row["job"] == "change":
        return f"{row['before']} → {row['choice']}, noticed after {row['noticed_after']} steps"
    return f"{row['choice']} after {row['num_trial_steps']} steps; {_ratios([row])}"


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that compare auto_hook with the fixed hooks."""
    found = [row for row in of(rows, job="auto") if "failed" not in row]
    return [row for row in found if PLAIN_HOOK in row["step_ms"]]


def table(rows: Sequence[Row]) -> str:
    """Format a table per model and number of hosts: a line per link, medians over the runs."""
    found = []
    for name, of_both in _by_model_and_hosts(compared(rows)).items():
        lines = [f"{name}: auto_hook after its trial, ms per step beside the fixed hooks'", ""]
        titles = (
            "Mbit/s",
            "auto_hook chose",
            "auto_hook",
            *CANDIDATES,
            PLAIN_HOOK,
            "times the best",
            "times none",
        )
        lines += ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
        for link in _links(of_both):
            runs = of(of_both, mbit_per_s=link)
            choices = ", ".join(dict.fromkeys(str(row["choice"]) for row in runs))
            hooks = [shown(median_ms(runs, hook)) for hook in ("auto", *CANDIDATES, PLAIN_HOOK)]
            cells = ["no throttle" if link is None else f"{link:,}", choices, *hooks, *_against(runs)]
            lines.append("| " + " | ".join(cells) + " |")
        found.append("\n".join(lines))
    changes = [row for row in of(rows, job="change") if "failed" not in row]
    found += [
        f"{row['model']}, {places(row)}, from {row['link_before']:,} to {row['mbit_per_s']:,} Mbit/s in "
        f"mid-run: {summary(row)}; chosen after {row['chosen_after']}"
        for row in changes
    ]
    return "\n\n".join(found)


def ratios(rows: Sequence[Row]) -> str:
    """Format times the best candidate, and times none: a line per model and hosts, a column per link.

    Ratios are medians over the runs. The last column compares auto_hook, over all links, with a model that
    uses the hook which it chose.
    """
    measured = compared(rows)
    links = _links(measured)
    titles = ["no throttle" if link is None else f"{link:,} Mbit/s" for link in links]
    lines = ["| " + " | ".join(["model", *titles, "times the hook that it chose"]) + " |"]
    lines.append("|" + "---|" * (len(links) + 2))
    for name, of_both in _by_model_and_hosts(measured).items():
        of_links = [of(of_both, mbit_per_s=link) for link in links]
        cells = [", ".join(_against(runs)) if runs else "" for runs in of_links]
        fixed = [(row["step_ms"]["auto"], _ms_of_choice(row)) for row in of_both]
        chosen = [auto_ms / ms for auto_ms, ms in fixed if ms is not None]
        cells.append(f"{statistics.median(chosen):.2f}" if chosen else "")
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def median_ms(runs: Sequence[Row], hook: str) -> float:
    """Return the median over runs of a hook's ms; with nodes, of its faster form."""
    return statistics.median(
        min(ms for name, ms in row["step_ms"].items() if name.removesuffix(FLAT) == hook) for row in runs
    )


def shown(milliseconds: float) -> str:
    """Format a step's time in ms: without decimals from 100 on, else with one."""
    return f"{milliseconds:.0f}" if milliseconds >= 99.95 else f"{milliseconds:.1f}"


def _ms_of_choice(row: Row) -> float | None:
    """Return the ms of the fixed hook, in the form, that auto_hook chose; None if that one wasn't timed."""
    times, choice = row["step_ms"], row["choice"]
    if choice.endswith(HIERARCHICAL):
        name = choice.removesuffix(HIERARCHICAL)
        return times[name] if name + FLAT in times else None
    return times.get(choice + FLAT, times[choice])


def _by_model_and_hosts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['model']}, {places(row)}", []).append(row)
    return found


def _links(rows: Sequence[Row]) -> list[int | None]:
    """Return the links of rows, in Mbit/s, without a throttle first."""
    return sorted({row["mbit_per_s"] for row in rows}, key=lambda link: link or 0)


def _ratios(runs: Sequence[Row]) -> str:
    best, none = _against(runs)
    return f"{best} times the best, {none} times none"


def _against(runs: Sequence[Row]) -> tuple[str, str]:
    """Return auto_hook's step over the fastest candidate's, and over none's, medians over the runs."""
    times = [row["step_ms"] for row in runs]
    best = [
        each["auto"] / min(ms for hook, ms in each.items() if hook not in ("auto", PLAIN_HOOK))
        for each in times
    ]
    none = [each["auto"] / each["none"] for each in times]
    return f"{statistics.median(best):.2f}", f"{statistics.median(none):.2f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: ms per step against bandwidth, a line per hook.

    There is a panel for each model and number of hosts and ranks, in which two links at least were measured.

    Raises ImportError without matplotlib, ValueError if there is no such panel.
    """
    measured = _by_model_and_hosts([row for row in compared(rows) if row["mbit_per_s"]])
    of_panels = {name: of_panel for name, of_panel in measured.items() if len(_links(of_panel)) > 1}
    if not of_panels:
        raise ValueError("a picture needs two links")
    with picture(path, len(of_panels)) as panels:
        for axes, (name, of_panel) in zip(panels, of_panels.items(), strict=True):
            links = _links(of_panel)
            colors = dict(zip(CANDIDATES, COLORS[1:], strict=False)) | {"auto": COLORS[0]}
            for hook, color in colors.items():
                times = [median_ms(of(of_panel, mbit_per_s=link), hook) for link in links]
                style = "--" if hook == "auto" else "-"
                axes.plot(links, times, style, marker="o", markersize=4, color=color, label=hook)
            label_axes(axes, name)
        panels[-1].legend(frameon=False)
