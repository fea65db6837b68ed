"""What the rows of a run say: tables, and a picture of time per step against bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.chart import COLORS

Row = dict[str, Any]

DRAWN = ("noop", "none", "fp16", "int8", "int4", "powersgd:4", "powersgd:8:int8")
# By wrapper.
ON = {"torch": "", "gradcomp": " on gradcomp's wrapper", "fsdp2": " on FSDP2", "local steps": " local steps"}
FLAT = ":flat"  # the end of the names of hooks that don't average by nodes


def label(row: Row) -> str:
    """Name what a row measures."""
    network = "no network" if row["mbit_per_s"] is None else f"{row['mbit_per_s']} Mbit/s"
    parts = [places(row), network]
    if row["job"] in ("auto", "change"):
        parts.append(row["model"])
    elif row["job"] != "link":
        parts += [row["model"], name(row)]
    if "seed" in row:
        parts.append(f"seed {row['seed']}")
    return ", ".join([*parts, row["job"]])


def places(row: Row) -> str:
    """Name the hosts, and the ranks on each if there are several. Rows before 2026-11-25 have one."""
    hosts = f"{row['hosts']} hosts" if row["hosts"] > 1 else "1 host"
    ranks = row.get("ranks_per_host", 1)
    return hosts if ranks == 1 else f"{hosts} of {ranks} ranks"


def name(row: Row) -> str:
    """Name a row's hook: whose it is unless gradcomp's, and on which wrapper unless torch's."""
    whose = "torch's " if row["hooks"] == "torch" else ""
    return f"{whose}{row['hook']}{ON[row['wrapper']]}"


def summary(row: Row) -> str:
    """Say in one line what a row holds."""
    if "failed" in row:
        return str(row["failed"])
    if row["job"] == "link":
        num_bytes, seconds = row["all_reduce_seconds"][-1]
        small = row["all_reduce_seconds"][0]
        return (
            f"all-reduce of {num_bytes:,} B {seconds * 1e3:.1f} ms, of {small[0]:,} B {small[1] * 1e3:.2f} ms"
        )
    if row["job"] == "steps":
        return f"{row['step_ms']:.1f} ms/step ({row['p20_ms']:.1f}-{row['p80_ms']:.1f})"
    reached = "reached" if row["reached"] else "NOT reached"
    return f"{reached} {row['target_loss']} in {row['seconds']:.1f} s, {row['num_steps']} steps"


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def tables(rows: Sequence[Row]) -> str:
    """Format ms per step, a table per number of hosts and model, and the times to a loss, as Markdown."""
    stepped, trained = of(rows, job="steps"), of(rows, job="loss")
    found = [
        _step_table([row for row in stepped if (places(row), row["model"]) == (hosts, model)])
        for hosts, model in dict.fromkeys((places(row), row["model"]) for row in stepped)
    ] + [
        _loss_table(of(trained, model=model, mbit_per_s=link))
        for model, link in dict.fromkeys((row["model"], row["mbit_per_s"]) for row in trained)
    ]
    return "\n\n".join("\n".join(lines) for lines in found)


def _step_table(rows: Sequence[Row]) -> list[str]:
    """Format the times per step of a model on a number of hosts: a line per hook, a column per link."""
    model, count = rows[0]["model"], places(rows[0])
    links = sorted({row["mbit_per_s"] or 0 for row in rows})
    titles = ["no network" if link == 0 else f"{link:,} Mbit/s" for link in links]
    lines = [f"{model}, {count}, ms per step, and how many times as fast as without a hook", ""]
    lines += ["| | bytes sent | " + " | ".join(titles) + " |", "|" + "---|" * (len(links) + 2)]
    for hook in dict.fromkeys(map(name, rows)):
        of_hook = [row for row in rows if name(row) == hook]
        sent = [row["sent_bytes_per_step"] for row in of_hook if "failed" not in row]
        cells = [f"{min(sent):,.0f}" if sent else ""]
        cells += [
            _cell(of(of_hook, mbit_per_s=link or None), of(rows, mbit_per_s=link or None)) for link in links
        ]
        lines.append(f"| {hook} | " + " | ".join(cells) + " |")
    return lines


def _loss_table(rows: Sequence[Row]) -> list[str]:
    """Format the times to a validation loss of a model on a link: a line per hook, medians over seeds."""
    target = next((row["target_loss"] for row in rows if "failed" not in row), None)
    link = f"{rows[0]['mbit_per_s']:,} Mbit/s"
    lines = [f"{rows[0]['model']}, 2 hosts, {link}: training to a validation loss of {target}", ""]
    lines += ["| | steps | seconds | times as fast |", "|---|---|---|---|"]
    baselines = {row.get("seed"): row["seconds"] for row in of(rows, hook="none", reached=True)}
    for hook in dict.fromkeys(map(name, rows)):
        of_hook = [row for row in rows if name(row) == hook]
        failed = [failure(row) for row in of_hook if "failed" in row]
        if failed:
            cells = ["", failed[0], ""]
        else:
            late = "" if all(row["reached"] for row in of_hook) else " (not reached)"
            faster = [baselines.get(row.get("seed"), 0) / row["seconds"] for row in of_hook]
            cells = [
                _spread([row["num_steps"] for row in of_hook], "g") + late,
                _spread([row["seconds"] for row in of_hook], ".1f"),
                "" if late or not all(faster) else _spread(faster, ".1f", "×"),
            ]
        lines.append(f"| {hook} | " + " | ".join(cells) + " |")
    return lines


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Format the median of values from several seeds, and their range."""
    low, middle, high = (f"{each:{form}}" for each in (min(values), statistics.median(values), max(values)))
    return middle + unit + (f" ({low} to {high})" if low != high else "")


def _cell(found: Sequence[Row], beside: Sequence[Row]) -> str:
    """Format one hook's time on a link, beside the rows of that link."""
    if not found:
        return ""
    row = found[0]
    if "failed" in row:
        return failure(row)
    baseline = of(beside, hook="none", hooks="gradcomp", wrapper="torch")
    times = ""
    if baseline and "step_ms" in baseline[0] and row is not baseline[0]:
        times = f", {baseline[0]['step_ms'] / row['step_ms']:.1f}×"
    return f"{row['step_ms']:.1f}{times}"


def failure(row: Row) -> str:
    """Say in a word how a job failed: it aborts, or hangs."""
    return str(row["failed"]).partition(":")[0]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: ms per step against bandwidth on two hosts, a line per hook.

    There is a panel for each model and number of ranks per host.

    Raises ImportError without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in of(rows, job="steps", hosts=2, wrapper="torch") if "failed" not in row]
    titles = list(dict.fromkeys(map(_panel, shown))) or ["nothing measured on two hosts"]
    figure, panels = pyplot.subplots(
        1, len(titles), figsize=(5.2 * len(titles), 4.4), layout="constrained", squeeze=False
    )
    for axes, title in zip(panels[0], titles, strict=True):
        in_panel = [row for row in shown if _panel(row) == title]
        colors = dict(zip(DRAWN, COLORS, strict=False))
        for hook in (*DRAWN, *(f"{each}{FLAT}" for each in DRAWN)):
            of_hook = sorted(of(in_panel, hook=hook, hooks="gradcomp"), key=lambda row: row["mbit_per_s"])
            if of_hook:
                links, times = zip(*((row["mbit_per_s"], row["step_ms"]) for row in of_hook), strict=True)
                style = ":" if hook == "noop" else "--" if hook.endswith(FLAT) else "-"
                color = colors[hook.removesuffix(FLAT)]
                axes.plot(links, times, style, marker="o", markersize=4, color=color, label=hook)
        label_axes(axes, title)
    if panels[0][-1].lines:
        panels[0][-1].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def label_axes(axes: Any, title: str) -> None:
    """Make a panel of ms per step against bandwidth, both on logarithmic scales."""
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="ms per step")
    axes.set_title(title, loc="left")
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _panel(row: Row) -> str:
    return f"{row['model']}, {places(row)}"
