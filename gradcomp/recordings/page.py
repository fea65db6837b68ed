"""The command `python -m gradcomp report` and its page: HTML with style and line charts, no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from gradcomp.command_line import OneLineParser
from gradcomp.compress.announcement import shown_bytes
from gradcomp.compress.recording.file import read

from .run import RecordedRun, runs_of

# In the SVG's own units: narrow, so that text stays readable on a telephone.
WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 44
LABELED_HEIGHT = HEIGHT + 48
# More points can't be told apart in a chart.
MAX_POINTS = 240

Point = tuple[int, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    points: (x, y).
    band: (x, low, high) around the line; may be empty.
    """

    label: str
    points: Sequence[Point]
    band: Sequence[tuple[int, float, float]] = ()
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps. All values are finite.

    shown: formats a value of the y axis. The axis begins at 0, or at the least value if that is negative.
    steps: the first and the last step of the x axis.
    top: the least end of the y axis.
    note: a sentence below the legend.
    """

    title: str
    lines: Sequence[Line]
    shown: Format
    steps: tuple[int, int]
    top: float | None = None
    note: str = ""

    @property
    def text(self) -> str:
        """The chart in words: the end of each line."""
        ends = [(line.label, *line.points[-1]) for line in self.lines]
        return ", ".join(f"{label}: {self.shown(y)} in step {step}" for label, step, y in ends)

    def figure(self) -> str:
        """Return an HTML figure: title, picture, legend."""
        legend = "".join(
            f'<span><svg class="swatch" viewBox="0 0 24 8" aria-hidden="true">{_sample(index, line)}</svg> '
            f"{escape(line.label)}</span>"
            for index, line in enumerate(self.lines)
        )
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f"<figure><figcaption>{escape(self.title)}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}. {escape(self.text)}">{self.drawn()}</svg>'
            f'<p class="legend">{legend}</p>{note}</figure>'
        )

    def labeled(self) -> str:
        """Return SVG elements for title, picture and legend, WIDTH wide and LABELED_HEIGHT high."""
        legend, x = [], LEFT
        for index, line in enumerate(self.lines):
            legend.append(
                f'<g transform="translate({x} {HEIGHT + 30})">{_sample(index, line)}'
                f'<text x="30" y="8">{escape(line.label)}</text></g>'
            )
            x += 60 + 7 * len(line.label)
        return (
            f'<text class="title" x="8" y="18">{escape(self.title)}</text>'
            f'<g transform="translate(0 26)">{self.drawn()}</g>{"".join(legend)}'
        )

    def drawn(self) -> str:
        """Return SVG elements for axes and lines, WIDTH wide and HEIGHT high."""
        lines = [_thinned(line) for line in self.lines]
        ys = [y for line in lines for _, y in line.points]
        ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
        y_ticks = _ticks(min(0.0, *ys), max(ys + ([] if self.top is None else [self.top])))
        y_range = (y_ticks[0], y_ticks[-1])

        def at(x: float, y: float) -> str:
            across = _place(x, self.steps, LEFT, WIDTH - RIGHT)
            return f"{across:.1f},{_place(y, y_range, HEIGHT - BOTTOM, TOP):.1f}"

        parts = [_axes(self.steps, y_ticks, self.shown)]
        for index, line in enumerate(lines):
            if line.band:
                edge = [at(x, high) for x, _, high in line.band] + [
                    at(x, low) for x, low, _ in line.band[::-1]
                ]
                parts.append(f'<polygon class="band line{index}" points="{" ".join(edge)}"/>')
            points = [at(x, y) for x, y in line.points]
            parts.append(f'<polyline class="{_classes(index, line)}" points="{" ".join(points)}"/>')
            if len(points) == 1:
                x, y = points[0].split(",")
                parts.append(f'<circle class="dot line{index}" cx="{x}" cy="{y}" r="3"/>')
        return "".join(parts)


def _classes(index: int, line: Line) -> str:
    return f"line line{index}{' dashed' if line.is_dashed else ''}"


def _sample(index: int, line: Line) -> str:
    return f'<line class="{_classes(index, line)}" x1="0" x2="24" y1="4" y2="4"/>'


def _thinned(line: Line) -> Line:
    """Merge neighboring points: take the median of their values, and the whole range of their bands."""
    size = -(-len(line.points) // MAX_POINTS)
    if size <= 1:
        return line
    points, band = [], []
    for start in range(0, len(line.points), size):
        some = line.points[start : start + size]
        points.append((some[-1][0], median(y for _, y in some)))
        if line.band:
            ranges = line.band[start : start + size]
            band.append((some[-1][0], min(low for _, low, _ in ranges), max(high for *_, high in ranges)))
    points[-1] = line.points[-1]
    return Line(line.label, points, band, line.is_dashed)


def _axes(steps: tuple[int, int], y_ticks: Sequence[float], shown: Format) -> str:
    parts = []
    for tick in y_ticks:
        y = _place(tick, (y_ticks[0], y_ticks[-1]), HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(shown(tick))}</text>')
    for tick in _ticks(*steps):
        if steps[0] <= tick <= steps[1] and tick == int(tick):
            x = _place(tick, steps, LEFT, WIDTH - RIGHT)
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{int(tick):,}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    return "".join(parts)


def _place(value: float, between: tuple[float, float], first: float, last: float) -> float:
    low, high = between
    return first + (last - first) * ((value - low) / (high - low) if high > low else 0.5)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about count round numbers. The first is at most low, the last at least high."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


# Okabe and Ito's blue and orange, which color-blind readers can distinguish; lighter ones on a dark page.
COLORS = """
:root { color-scheme: light dark; --ink: #1c1f23; --faint: #5c6570; --page: #ffffff; --card: #f5f7f9;
  --rule: #d6dce2; --line0: #0072b2; --line1: #b85500; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --faint: #a3adb8; --page: #14171a;
  --card: #1e2327; --rule: #3a424a; --line0: #56b4e9; --line1: #f0a040; } }
"""
OF_PICTURES = """
text { font: 13px system-ui, sans-serif; fill: var(--faint); }
.title { font-weight: 600; fill: var(--ink); } .card { fill: var(--card); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dashed { stroke-dasharray: 6 4; }
.band { opacity: .22; stroke: none; }
.line.line0 { stroke: var(--line0); } .line.line1 { stroke: var(--line1); }
.band.line0, .dot.line0 { fill: var(--line0); } .band.line1, .dot.line1 { fill: var(--line1); }
"""
OF_THE_PAGE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.25rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .75rem; }
.from, .note, .legend { color: var(--faint); margin: .25rem 0; font-size: .9rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 500; color: var(--faint); width: 40%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem;
  margin-top: 1rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
figure > svg { display: block; width: 100%; height: auto; }
.legend span { margin-right: 1rem; }
.swatch { width: 1.5rem; height: .5rem; vertical-align: middle; }
"""
# A picture of several charts: its columns, and the gap between them.
COLUMNS, GAP = 2, 16
UNKNOWN = "not known: Recorder.complete() was not called on every rank before Recorder.save()"


def page(runs: Sequence[RecordedRun], file_names: Sequence[str]) -> str:
    """Return the HTML page about these runs."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>gradcomp: what compression did</title>"
        f"<style>{COLORS}{OF_PICTURES}{OF_THE_PAGE}</style></head><body>"
        "<h1>What compression did</h1>"
        f'<p class="from">Recorded by gradcomp in {escape(", ".join(file_names))}.</p>'
        f"{''.join(_section(run) for run in runs)}</body></html>\n"
    )


def picture(run: RecordedRun) -> str:
    """Return the run's charts as one SVG file."""
    charts = _charts(run)
    across, down = WIDTH + GAP, LABELED_HEIGHT + GAP
    width, height = across * COLUMNS + GAP, down * -(-len(charts) // COLUMNS) + GAP
    cells = []
    for index, chart in enumerate(charts):
        row, column = divmod(index, COLUMNS)
        cells.append(
            f'<g transform="translate({GAP + across * column} {GAP + down * row})"><rect class="card" rx="8" '
            f'width="{WIDTH}" height="{LABELED_HEIGHT}"/>{chart.labeled()}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{COLORS}{OF_PICTURES}</style>'
        f'<rect width="{width}" height="{height}" fill="var(--page)"/>{"".join(cells)}</svg>\n'
    )


def _section(run: RecordedRun) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _summary(run)
    )
    charts = "".join(chart.figure() for chart in _charts(run))
    return f'<h2>{escape(run.algorithm)}</h2><table>{rows}</table><div class="charts">{charts}</div>'


def _summary(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the rows of a run's table, (name, value)."""
    steps, plain = run.steps, {row["step"] for row in run.rows if not row["compressed"]}
    gradient_bytes, sent_bytes = run.total("gradient_bytes"), run.total("sent_bytes")
    compressed = _ratio(run.total("gradient_bytes", True), run.total("sent_bytes", True))
    error, energy = (run.mean_of_compressed_steps(name) for name in ("relative_error", "energy_kept"))
    time_ms = run.median_time_ms()
    return [
        ("Options", ", ".join(f"{name} = {value}" for name, value in run.options.items()) or "none"),
        ("World size", f"{run.world_size:,}"),
        ("Ranks recorded", ", ".join(map(str, run.ranks))),
        (
            "Steps recorded",
            f"{len(steps):,}, from {steps[0]:,} to {steps[-1]:,}; {len(plain):,} of them without compression",
        ),
        ("Buckets", f"{run.num_buckets:,}"),
        ("Compression rate of the compressed steps", compressed),
        (
            "Bytes saved in the recorded steps, per rank",
            f"{shown_bytes(gradient_bytes - sent_bytes)} of {shown_bytes(gradient_bytes)}",
        ),
        ("Mean relative error of the compressed steps", UNKNOWN if error is None else f"{error:.4f}"),
        ("Mean energy kept", "not known" if energy is None else f"{energy:.4f}"),
        ("Median time of a bucket", "not known" if time_ms is None else f"{time_ms:.3g} ms"),
        *((f"Choice before step {each['step']:,}", _choice(each)) for each in run.choices),
    ]


def _choice(choice: dict[str, Any]) -> str:
    """Say what an AutoState has chosen, with the time of a step and its bytes for each candidate."""
    times = []
    for each in choice["candidates"]:
        ms = "not known" if each["ms"] is None else f"{each['ms']:.3g} ms"
        sent = "" if each["sent_bytes"] is None else f", {shown_bytes(each['sent_bytes'])}"
        times.append(f"{each['candidate']} {ms}{sent}")
    return f"{choice['choice']}. A step with {'; '.join(times)}"


def _charts(run: RecordedRun) -> list[Chart]:
    """Return a run's charts, without those that have no points."""
    rate = Line("all buckets of a step", run.of_steps("rate"))
    sent = Line("sent", run.cumulated("sent_bytes"))
    without = Line("without compression", run.cumulated("gradient_bytes"), is_dashed=True)
    charts = [
        _chart(run, "Compression rate", [rate], _number),
        _chart(run, "Bytes per rank, summed over the recorded steps", [sent, without], shown_bytes),
        _spread(run, "Relative error of the average", "relative_error"),
        _spread(run, "Energy kept", "energy_kept", top=1.0),
        _spread(run, "Time of a bucket, ms", "time_ms"),
    ]
    return [chart for chart in charts if all(line.points for line in chart.lines)]


def _spread(run: RecordedRun, title: str, name: str, top: float | None = None) -> Chart:
    """Return a chart of a value over the buckets of each step: its median and range."""
    spreads, num_left_out = run.spreads(name), run.num_not_finite(name)
    line = Line(
        "median of the buckets, and their range",
        [(each.step, each.middle) for each in spreads],
        [(each.step, each.low, each.high) for each in spreads],
    )
    note = f"{num_left_out:,} values of inf or NaN are left out." if num_left_out else ""
    return _chart(run, title, [line], _number, top, note)


def _chart(
    run: RecordedRun, title: str, lines: list[Line], shown: Format, top: float | None = None, note: str = ""
) -> Chart:
    steps = run.steps
    return Chart(title, lines, shown, (steps[0], steps[-1]), top, note)


def _ratio(whole: int, part: int) -> str:
    if not whole:
        return "no step was compressed"
    return f"{whole / part:.2f}" if part else "nothing was sent"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        prog="python -m gradcomp report",
        description="Write an HTML page, with tables and pictures, about the files that Recorder.save wrote. "
        "Files of several ranks of a run are put together.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files that Recorder.save wrote.")
    text = "The page to write. Default: %(default)s."
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="PAGE", help=text)
    text = "Write the first run's charts to this file, too, without the page around them."
    parser.add_argument("--svg", type=Path, metavar="PICTURE", help=text)
    options = parser.parse_args(arguments)
    for name, written in (("--out", options.out), ("--svg", options.svg)):
        if written is not None and any(written.absolute() == file.absolute() for file in options.files):
            parser.error(f"argument {name}: {written} is one of the files to read")
    try:
        recordings = [recording for file in options.files for recording in read(file)]
        runs = runs_of(recordings)
        if not runs:
            names = ", ".join(map(str, options.files))
            parser.error(f"no rows in {names}. Likely cause: no step was recorded before Recorder.save")
        options.out.write_text(page(runs, [file.name for file in options.files]), encoding="utf-8")
        if options.svg is not None:
            options.svg.write_text(picture(runs[0]), encoding="utf-8")
    except FileNotFoundError as error:
        parser.error(f"there is no file {error.filename}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.out}: {sum(len(run.steps) for run in runs)} steps of {len(runs)} run(s)")
