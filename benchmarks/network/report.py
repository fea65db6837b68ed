"""What the rows of a run say: tables, and a picture of time per step against bandwidth or delay."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLORS, picture

Row = dict[str, Any]
Link = tuple[int, float | None]  # Mbit/s, 0 for no network, and one-way ms, None without a router

DRAWN = ("noop", "none", "fp16", "int8", "int4", "powersgd:4", "powersgd:8:int8")
# By wrapper.
ON = {"torch": "", "gradcomp": " on gradcomp's wrapper", "fsdp2": " on FSDP2", "local steps": " local steps"}
FLAT = ":flat"  # the end of the names of hooks that don't average hierarchically


def label(row: Row) -> str:
    """Name what a row measures."""
    link = "no network" if row["mbit_per_s"] is None else f"{row['mbit_per_s']} Mbit/s"
    parts = [places(row), link + _delay(row.get("delay_ms"))]
    if row["job"] in ("auto", "change"):
        parts.append(row["model"])
    elif row["job"] != "link":
        parts += [row["model"], name(row)]
    if "seed" in row:
        parts.append(f"seed {row['seed']}")
    if row["job"] == "steps" and row.get("run"):
        parts.append(f"run {row['run'] + 1}")
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


def _delay(delay_ms: float | None) -> str:
    return "" if delay_ms is None else f", {delay_ms:g} ms"


def summary(row: Row) -> str:
    """Say in one line what a row holds, and how many packets were lost, which makes times longer."""
    dropped = row.get("dropped_packets")
    return _result(row) + (f"; {dropped:,} PACKETS DROPPED" if dropped else "")


def _result(row: Row) -> str:
    if "failed" in row:
        return str(row["failed"])
    if row["job"] == "link":
        num_bytes, seconds = row["all_reduce_seconds"][-1]
        small = row["all_reduce_seconds"][0]
        exchange = ""
        if "exchange_seconds" in row:
            exchange = f"exchange of 8 B {row['exchange_seconds'] * 1e3:.2f} ms, "
        return (
            f"{exchange}all-reduce of {num_bytes:,} B {seconds * 1e3:.1f} ms, "
            f"of {small[0]:,} B {small[1] * 1e3:.2f} ms"
        )
    if row["job"] == "steps":
        chose = f", chose {row['choice']}" if "choice" in row else ""
        return f"{row['step_ms']:.1f} ms/step ({row['p20_ms']:.1f}-{row['p80_ms']:.1f}){chose}"
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
        _loss_table([row for row in of(trained, model=model) if _link(row) == link])
        for model, link in dict.fromkeys((row["model"], _link(row)) for row in trained)
    ]
    return "\n\n".join("\n".join(lines) for lines in found)


def _link(row: Row) -> Link:
    """Return a row's link. Rows before 2026-11-27 have no delay."""
    return row["mbit_per_s"] or 0, row.get("delay_ms")


def in_order(links: Iterable[Link]) -> list[Link]:
    """Return different links, by bandwidth and then by delay."""
    return sorted(set(links), key=lambda link: (link[0], -1 if link[1] is None else link[1]))


def link_title(link: Link) -> str:
    mbit_per_s, delay_ms = link
    return f"{mbit_per_s:,} Mbit/s{_delay(delay_ms)}" if mbit_per_s else "no network"


def _step_table(rows: Sequence[Row]) -> list[str]:
    """Format the times per step of a model on a number of hosts: a line per hook, a column per link."""
    model, count = rows[0]["model"], places(rows[0])
    links = in_order(map(_link, rows))
    lines = [f"{model}, {count}, ms per step, and how many times as fast as without a hook", ""]
    titles = ["bytes sent", *map(link_title, links)]
    lines += ["| | " + " | ".join(titles) + " |", "|" + "---|" * (len(titles) + 1)]
    for hook in dict.fromkeys(map(name, rows)):
        of_hook = [row for row in rows if name(row) == hook]
        sent = [row["sent_bytes_per_step"] for row in of_hook if "failed" not in row]
        cells = [f"{min(sent):,.0f}" if sent else ""]
        for link in links:
            beside = [row for row in rows if _link(row) == link]
            cells.append(_cell([row for row in of_hook if _link(row) == link], beside))
        lines.append(f"| {hook} | " + " | ".join(cells) + " |")
    if lossy := [row for row in rows if row.get("dropped_packets")]:
        which = dict.fromkeys(f"{name(row)} at {link_title(_link(row))}" for row in lossy)
        lines += ["", f"PACKETS WERE DROPPED, so times may be too long: {'; '.join(which)}"]
    return lines


def _loss_table(rows: Sequence[Row]) -> list[str]:
    """Format the times to a validation loss of a model on a link: a line per hook, medians over seeds."""
    target = next((row["target_loss"] for row in rows if "failed" not in row), None)
    link = link_title(_link(rows[0]))
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
    """Format the median of values from several seeds or runs, and their range."""
    low, middle, high = (f"{each:{form}}" for each in (min(values), statistics.median(values), max(values)))
    return middle + unit + (f" ({low} to {high})" if low != high else "")


def _cell(found: Sequence[Row], beside: Sequence[Row]) -> str:
    """Format one hook's time on a link, the median of its runs, beside all rows of that link."""
    if not found:
        return ""
    if failed := [row for row in found if "failed" in row]:
        return failure(failed[0])
    baseline = of(beside, hook="none", hooks="gradcomp", wrapper="torch")
    times = ""
    if baseline and all("step_ms" in row for row in baseline) and found[0] is not baseline[0]:
        times = f", {median_ms(baseline) / median_ms(found):.1f}×"
    return _spread([row["step_ms"] for row in found], ".1f") + times


def median_ms(runs: Sequence[Row]) -> float:
    return statistics.median(row["step_ms"] for row in runs)


def failure(row: Row) -> str:
    """Say in a word how a job failed: it aborts, or hangs."""
    return str(row["failed"]).partition(":")[0]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: ms per step against bandwidth on two hosts, a line per hook, of medians over runs.

    There is a panel for each model and number of ranks per host. With delays, time is shown against them, and
    there is a panel for each link too.

    Raises ImportError without matplotlib.
    """
    shown = [row for row in of(rows, job="steps", hosts=2, wrapper="torch") if "failed" not in row]
    titles = list(dict.fromkeys(map(_panel, shown))) or ["nothing measured on two hosts"]
    with picture(path, len(titles)) as panels:
        for axes, title in zip(panels, titles, strict=True):
            _draw_panel(axes, title, [row for row in shown if _panel(row) == title])
        if panels[-1].lines:
            panels[-1].legend(frameon=False)


def _draw_panel(axes: Any, title: str, rows: Sequence[Row]) -> None:
    has_delays = any(row.get("delay_ms") is not None for row in rows)
    colors = dict(zip(DRAWN, COLORS, strict=False))
    for hook in (*DRAWN, *(f"{each}{FLAT}" for each in DRAWN)):
        by_x: dict[float, list[Row]] = {}
        for row in of(rows, hook=hook, hooks="gradcomp"):
            by_x.setdefault(row["delay_ms" if has_delays else "mbit_per_s"], []).append(row)
        if by_x:
            where, times = zip(*((x, median_ms(by_x[x])) for x in sorted(by_x)), strict=True)
            style = ":" if hook == "noop" else "--" if hook.endswith(FLAT) else "-"
            color = colors[hook.removesuffix(FLAT)]
            axes.plot(where, times, style, marker="o", markersize=4, color=color, label=hook)
    label_axes(axes, title)
    if has_delays:
        axes.set(xscale="linear", xlabel="one-way delay, ms")


def label_axes(axes: Any, title: str) -> None:
    """Make a panel of ms per step against bandwidth, both on logarithmic scales."""
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="ms per step")
    axes.set_title(title, loc="left")
    axes.grid(which="major", alpha=0.3)


def _panel(row: Row) -> str:
    link = "" if row.get("delay_ms") is None else f", {row['mbit_per_s']:,} Mbit/s"
    return f"{row['model']}, {places(row)}{link}"
