"""What the rows of a run say: tables, and a picture of time per step against the delay."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLORS, label_decades, picture
from benchmarks.records import Row
from benchmarks.training.averaging import FLAT, LOCAL, SHARDED

Link = tuple[int, float | None]  # Mbit/s, and one-way ms, None without a router

# The hooks in pictures and in README, in words.
DRAWN = {"none": "no hook", "bf16": "16 bits", "int8": "8 bits", "int4": "4 bits"}
DRAWN |= {f"powersgd:{rank}:int8": f"PowerSGD, rank {rank}, 8-bit factors" for rank in (16, 8)}
DRAWN |= {"auto": "auto_hook", "noop": "no communication"}
MODELS = {"mlp": "perceptron of 1.9 million parameters", "gpt": "GPT of 0.9 million parameters"}
# By the beginning of a hook's name: whose a hook is, and what averages with it.
PLACES = {
    "torch:": ("torch", "torch"),
    LOCAL: ("gradcomp", "local steps"),
    SHARDED: ("gradcomp", "fsdp2"),
    "": ("gradcomp", "torch"),
}
ON = {"torch": "", "fsdp2": " on FSDP2", "local steps": " local steps"}  # by wrapper
PLAIN = {"fsdp2": "fp32:fp32"}  # by wrapper, the steps that others are compared with; else none on torch's


def placed(hook: str) -> Row:
    """Return a hook's fields in a row: its library, its name there, and the wrapper that calls it."""
    start = next(start for start in PLACES if hook.startswith(start))
    hooks, wrapper = PLACES[start]
    return {"hooks": hooks, "hook": hook.removeprefix(start), "wrapper": wrapper}


def name_of(row: Row) -> str:
    """Return the name of a row's hook; see training/averaging.py."""
    (start,) = (start for start, place in PLACES.items() if place == (row["hooks"], row["wrapper"]))
    return f"{start}{row['hook']}"


def label(row: Row) -> str:
    """Name what a row measures."""
    parts = [places(row), link_title(_link(row))]
    if row["job"] != "link":
        parts += [row["model"], name(row)]
    if row.get("run"):
        parts.append(f"run {row['run'] + 1}")
    return ", ".join([*parts, row["job"]])


def places(row: Row) -> str:
    """Name the hosts, and the ranks on each if there are several."""
    ranks = row.get("ranks_per_host", 1)
    return f"{row['hosts']} hosts" + (f" of {ranks} ranks" if ranks > 1 else "")


def name(row: Row) -> str:
    """Name a row's hook: whose it is unless gradcomp's, and on which wrapper unless torch's."""
    return "torch's " * (row["hooks"] == "torch") + row["hook"] + ON[row["wrapper"]]


def summary(row: Row) -> str:
    """Say in one line what a row holds, and how many packets were lost, which makes times longer."""
    if "failed" in row:
        result = str(row["failed"])
    elif row["job"] == "link":
        (few, of_few), *_, (many, of_many) = row["all_reduce_seconds"]
        result = (
            f"exchange of 8 B {row['exchange_seconds'] * 1e3:.2f} ms, all-reduce of {many:,} B "
            f"{of_many * 1e3:.1f} ms, of {few:,} B {of_few * 1e3:.2f} ms"
        )
    else:
        chose = f", chose {row['choice']}" if "choice" in row else ""
        result = f"{row['step_ms']:.1f} ms/step ({row['p20_ms']:.1f}-{row['p80_ms']:.1f}){chose}"
    dropped = row.get("dropped_packets")
    return result + (f"; {dropped:,} PACKETS DROPPED" if dropped else "")


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def tables(rows: Sequence[Row]) -> str:
    """Format ms per step, a table per number of hosts and model, as Markdown."""
    stepped = of(rows, job="steps")
    found = [
        _step_table([row for row in stepped if (places(row), row["model"]) == (hosts, model)])
        for hosts, model in dict.fromkeys((places(row), row["model"]) for row in stepped)
    ]
    return "\n\n".join("\n".join(lines) for lines in found)


def _link(row: Row) -> Link:
    return row["mbit_per_s"], row.get("delay_ms")


def link_title(link: Link) -> str:
    mbit_per_s, delay_ms = link
    return f"{mbit_per_s:,} Mbit/s" + ("" if delay_ms is None else f", {delay_ms:g} ms")


def _step_table(rows: Sequence[Row]) -> list[str]:
    """Format the times per step of a model on a number of hosts: a line per hook, a column per link."""
    model, count = rows[0]["model"], places(rows[0])
    links = sorted(set(map(_link, rows)), key=lambda link: (link[0], -1 if link[1] is None else link[1]))
    lines = [f"{model}, {count}: times as fast as without a hook, and ms per step", ""]
    titles = ["bytes sent", *map(link_title, links)]
    lines += ["| | " + " | ".join(titles) + " |", "|" + "---|" * (len(titles) + 1)]
    for hook in dict.fromkeys(map(name, rows)):
        of_hook = [row for row in rows if name(row) == hook]
        first = [row for row in of_hook if _link(row) == links[0]]  # links differ in TCP's headers
        sent = [row["sent_bytes_per_step"] for row in first if "failed" not in row]
        cells = [f"{statistics.median(sent):,.0f}" if sent else ""]
        for link in links:
            beside = [row for row in rows if _link(row) == link]
            cells.append(cell([row for row in of_hook if _link(row) == link], beside))
        lines.append(f"| {hook} | " + " | ".join(cells) + " |")
    if lossy := [row for row in rows if row.get("dropped_packets")]:
        which = dict.fromkeys(f"{name(row)} at {link_title(_link(row))}" for row in lossy)
        lines += ["", f"PACKETS WERE DROPPED, so times may be too long: {'; '.join(which)}"]
    return lines


def differences(rows: Sequence[Row]) -> str:
    """Say how much longer the slowest run of a measurement took than the fastest; "" of single runs."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in of(rows, job="steps"):
        if "failed" not in row:
            found.setdefault((places(row), _link(row), row["model"], name(row)), []).append(row["step_ms"])
    percent = [100 * (max(times) / min(times) - 1) for times in found.values() if len(times) > 1]
    if not percent:
        return ""
    half, worst = statistics.median(percent), max(percent)
    return f"The slowest run took {half:.0f} % longer than the fastest (median; at most {worst:.0f} %)"


def cell(found: Sequence[Row], beside: Sequence[Row]) -> str:
    """Format one hook's median time on a link: how many times as fast as the plain step, and ms."""
    if not found:
        return ""
    if failed := [row for row in found if "failed" in row]:
        return str(failed[0]["failed"]).partition(":")[0]  # aborts, or hangs
    wrapper = found[0]["wrapper"]
    plain = (PLAIN[wrapper], wrapper) if wrapper in PLAIN else ("none", "torch")
    baseline = of(beside, hook=plain[0], hooks="gradcomp", wrapper=plain[1])
    ms = f"{(median := median_ms(found)):.{0 if median >= 99.95 else 1}f}"
    if not baseline or any("failed" in row for row in baseline):
        return ms
    return f"{median_ms(baseline) / median:.1f}×, {ms}"


def median_ms(runs: Sequence[Row]) -> float:
    return statistics.median(row["step_ms"] for row in runs)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of ms per step on two hosts against the delay, a line per hook, of medians over runs.

    There is a panel for each model, number of ranks per host and bandwidth.

    Raises ImportError without matplotlib, ValueError if there is no panel with two points.
    """
    panels: dict[str, dict[str, dict[float, list[Row]]]] = {}
    for row in of(rows, job="steps", hosts=2, wrapper="torch", hooks="gradcomp"):
        has_delay = row.get("delay_ms") is not None
        if has_delay and "failed" not in row and row["hook"].removesuffix(FLAT) in DRAWN:
            title = f"{MODELS[row['model']]},\n{places(row)}, {row['mbit_per_s']:,} Mbit/s"
            by_delay = panels.setdefault(title, {}).setdefault(row["hook"], {})
            by_delay.setdefault(row["delay_ms"], []).append(row)
    panels = {title: lines for title, lines in panels.items() if len(_delays(lines)) > 1}
    if not panels:
        raise ValueError("it needs links with two delays between two hosts")
    with picture(path, len(panels)) as all_axes:
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            _draw_panel(axes, title, lines)
        legend = {"ncols": 2, "frameon": False, "fontsize": "small", "borderpad": 0}
        all_axes[0].legend(**legend, loc="lower left", bbox_to_anchor=(0, 1.24))


def _draw_panel(axes: Any, title: str, lines: dict[str, dict[float, list[Row]]]) -> None:
    colors = {**dict(zip(DRAWN, COLORS, strict=False)), "noop": COLORS[-1]}
    for hook in sorted(lines, key=lambda each: [*DRAWN].index(each.removesuffix(FLAT))):
        delays, times = zip(*((x, median_ms(runs)) for x, runs in sorted(lines[hook].items())), strict=True)
        style = ":" if hook == "noop" else "--" if hook.endswith(FLAT) or hook == "auto" else "-"
        plain = hook.removesuffix(FLAT)
        label = DRAWN[plain] + hook.removeprefix(plain)
        axes.plot(delays, times, style, marker="o", markersize=4, color=colors[plain], label=label)
    axes.set(yscale="log", ylabel="ms per step", xlabel="one-way delay, ms")
    delays = _delays(lines)
    axes.set_xticks([x for x in delays if not 0 < x < max(delays) / 10])  # their labels would touch
    label_decades(axes.yaxis)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(which="major", alpha=0.3)


def _delays(lines: dict[str, dict[float, list[Row]]]) -> list[float]:
    return sorted({delay for line in lines.values() for delay in line})
