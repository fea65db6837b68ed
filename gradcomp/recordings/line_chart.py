"""Line charts over steps, as inline SVG whose colours the page's style sheet chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

# In the SVG's own units: narrow, so that text stays readable on a telephone.
WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 44
LABELLED_HEIGHT = HEIGHT + 48
# More points than that can't be told apart.
MAX_POINTS = 240

Point = tuple[int, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A line of a chart: its points (x, y), and the band (x, low, high) around it, if it has one."""

    label: str
    points: Sequence[Point]
    band: Sequence[tuple[int, float, float]] = ()
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps, all of whose values are finite.

    shown: formats a value of the y axis, which begins at 0 or at the least value below. steps: the ends of
    the x axis. top: the y axis ends there or above. note: a sentence below the legend.
    """

    title: str
    lines: Sequence[Line]
    shown: Format
    steps: tuple[int, int]
    top: float | None = None
    note: str = ""

    @property
    def text(self) -> str:
        """The chart in words: where its lines end."""
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

    def labelled(self) -> str:
        """Return SVG elements, WIDTH wide and LABELLED_HEIGHT high: title, picture, legend."""
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
        """Return the elements of the SVG, WIDTH wide and HEIGHT high."""
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
    """Put neighbouring points together: the median of their values, and their bands' whole range."""
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
    """Return about so many round numbers from at most low to at least high."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]
