"""Charts as HTML with inline SVG: only the marks are SVG, stretched to the page's width; every word is HTML.

    figure.chart   h3 title, legend
      div.plot     svg (0..1000 × 0..1000, y downwards, not keeping its aspect), labels placed in per cent

So lines keep their thickness and words their size on any screen, and no script is needed to read a chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

SIZE = 1000  # of the drawing in both directions
_MOST_TICKS = 6
Values = Sequence[float | None]


@dataclass(frozen=True)
class Axis:
    """A scale from low to high with its labels; `title` says what and in which unit."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    title: str
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` is: 0 at low, 1 at high; beyond the ends it is at the end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(max((value - low) / (high - low), 0.0), 1.0)


def linear_axis(low: float, high: float, title: str, label: Callable[[float], str], most: int = _MOST_TICKS) -> Axis:
    """Ticks at multiples of 1, 2 or 5 times a power of ten; the axis ends at the tick at or above `high`."""
    high = high if high > low else low + 1
    step = _nice_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [(index * step, label(index * step)) for index in range(first, last + 1)]
    return Axis(ticks[0][0], ticks[-1][0], ticks, title)


def log_axis(low: float, high: float, title: str, label: Callable[[float], str]) -> Axis:
    """From 1, 2 or 5 times a power of ten below `low` (> 0) to one above `high`; ticks at those, or at powers only."""
    high = max(high, low * 1.01)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    places = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(place for place in places if place <= low * (1 + 1e-9))
    above = min(place for place in places if place >= high * (1 - 1e-9))
    ticks = [place for place in places if below <= place <= above]
    if last - first > 3:
        ticks = [10.0**power for power in range(first, last + 1) if below <= 10.0**power <= above]
    return Axis(below, above, [(place, label(place)) for place in ticks], title, log=True)


def fitting_axis(values: Sequence[float], title: str, label: Callable[[float], str]) -> Axis:
    """Logarithmic where the (ascending) values span more than a factor of 20, else linear from 0."""
    low, high = values[len(values) // 200], values[-1]  # not for one odd value at the low end
    if low > 0 and high > 20 * low:
        return log_axis(low, high, title, label)
    return linear_axis(0.0, high, title, label)


def percent_axis(title: str, parts: int = 4) -> Axis:
    """Shares from 0 to 1, labelled 0 to 100."""
    return Axis(0.0, 1.0, [(part / parts, f"{100 * part / parts:g}") for part in range(parts + 1)], title)


def time_axis(end: float) -> Axis:
    """Simulated time from 0 to `end` seconds, in the unit that suits it."""
    unit, name = next((pair for pair in _TIME_UNITS if end >= 3 * pair[0]), (1.0, "s"))
    step = next((step for step in _TIME_STEPS[name] if end / unit / step <= 8), _nice_step(end / unit / 8))
    places = [index * step for index in range(int(end / unit / step + 1e-9) + 1)]
    return Axis(0.0, end, [(place * unit, f"{place:g}") for place in places], f"simulated time, {name}")


_TIME_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
_TIME_STEPS = {
    "s": (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30),
    "min": (0.5, 1, 2, 5, 10, 15, 20, 30),
    "h": (0.5, 1, 2, 3, 6, 12),
    "days": (0.5, 1, 2, 5),
}


def _nice_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


@dataclass
class Chart:
    """One plot, built up mark by mark; `html` gives the figure.

    readings: (name, texts), what the pointer shows at each of `places` (positions 0 to 1000).
    """

    title: str
    x: Axis
    y: Axis
    meaning: str = ""
    css: str = ""
    marks: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    readings: list[tuple[str, list[str]]] = field(default_factory=list)

    def line(self, xs: Sequence[float], ys: Values, css: str, name: str = "") -> None:
        """A line through the points, broken where there is no value."""
        path = "".join(_path([(self._x(x), self._y(y)) for x, y in run]) for run in _runs(xs, ys))
        if path:
            self.marks.append(f'<path class="line {css}" d="{path}"/>')
        if name:
            self.legend.append((css, name))

    def band(self, xs: Sequence[float], low: Values, high: Values, css: str, name: str = "") -> None:
        """The area between two series that have their values at the same places."""
        path = ""
        for lower, upper in zip(_runs(xs, low), _runs(xs, high), strict=True):
            outline = [(self._x(x), self._y(y)) for x, y in [*upper, *reversed(lower)]]
            path += _path(outline) + "Z"
        if path:
            self.marks.append(f'<path class="band {css}" d="{path}"/>')
        if name:
            self.legend.append((f"{css} wide", name))

    def dots(self, cells: Iterable[tuple[int, int]], css: str, name: str = "") -> None:
        """Dots at places of the drawing."""
        path = "".join(f"M{x} {y}h0" for x, y in cells)
        if path:
            self.marks.append(f'<path class="dots {css}" d="{path}"/>')
        if name:
            self.legend.append((f"{css} dot", name))

    def shade(self, start: float, end: float, css: str) -> None:
        left, right = self._x(start), self._x(end)
        width = max(right - left, 1)
        self.marks.insert(0, f'<rect class="shade {css}" x="{left}" y="0" width="{width}" height="{SIZE}"/>')

    def upright(self, x: float, css: str, label: str = "") -> None:
        """A vertical mark; its label stands at the top, on the side that has room."""
        place = self._x(x)
        self.marks.append(f'<path class="mark {css}" d="M{place} 0V{SIZE}"/>')
        if label:
            side = "left" if place < 0.7 * SIZE else "right"
            offset = place if side == "left" else SIZE - place
            self.labels.append(f'<b class="{css}" style="{side}:{offset / 10:g}%">{escape(label)}</b>')

    def point(self, x: float, y: float, css: str, label: str, above: bool) -> None:
        """A dot on a curve that rises to the right. Its label stands where no curve is: above left or below right;
        where the border is too near, on the other side and lower."""
        left, top = self._x(x), self._y(y)
        self.marks.append(f'<path class="dots big {css}" d="M{left} {top}h0"/>')
        to_left = left > 0.3 * SIZE if above else left > 0.7 * SIZE
        place = f"right:{(SIZE - left) / 10:g}%" if to_left else f"left:{left / 10:g}%"
        side = ("above" if above else "low") if to_left else "below"
        self.labels.append(f'<i class={side} style="{place};top:{top / 10:g}%">{escape(label)}</i>')

    def hover(self, xs: Sequence[float], readings: list[tuple[str, list[str]]]) -> None:
        """What the pointer shows: for each name the text at each of `xs`."""
        self.places = [self._x(x) for x in xs]
        self.readings = readings

    def _x(self, value: float) -> int:
        return round(self.x.at(value) * SIZE)

    def _y(self, value: float) -> int:
        return round((1 - self.y.at(value)) * SIZE)

    def html(self) -> str:
        legend = "".join(f'<span><s class="{css}"></s>{escape(name)}</span>' for css, name in self.legend)
        meaning = f"<p>{escape(self.meaning)}</p>" if self.meaning else ""
        head = f"<h3>{escape(self.title)}</h3>{meaning}"
        foot = f"<div class=legend>{legend}</div>" if legend else ""
        svg = (
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(self.title)}">{self._grid()}{"".join(self.marks)}</svg>'
        )
        plot = f"<div class=plot{self._hover()}>{svg}{self._ticks()}{''.join(self.labels)}</div>"
        return (
            f'<figure class="chart {self.css}"><figcaption>{head}{foot}</figcaption>'
            f"<div class=yt>{escape(self.y.title)}</div>{plot}<div class=xt>{escape(self.x.title)}</div></figure>"
        )

    def _grid(self) -> str:
        across = "".join(f"M0 {self._y(value)}H{SIZE}" for value, _ in self.y.ticks)
        return f'<path class="grid" d="{across}"/>'

    def _ticks(self) -> str:
        under = [
            f'<u class="{"x odd" if index % 2 else "x"}" style="left:{self.x.at(value) * 100:.4g}%">{escape(text)}</u>'
            for index, (value, text) in enumerate(self.x.ticks)
        ]
        beside = [
            f'<u class=y style="top:{(1 - self.y.at(value)) * 100:.4g}%">{escape(text)}</u>'
            for value, text in self.y.ticks
        ]
        return "".join(under + beside)

    def _hover(self) -> str:
        if not self.places:
            return ""
        data = json.dumps([self.places, self.readings], ensure_ascii=False, separators=(",", ":"))
        return f' data-hover="{escape(data)}"'


def _runs(xs: Sequence[float], ys: Values) -> list[list[tuple[float, float]]]:
    """The stretches of points that have a value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[tuple[int, int]]) -> str:
    """A polyline; points that repeat the height of both neighbours are left out."""
    kept = [
        point
        for index, point in enumerate(points)
        if index in (0, len(points) - 1) or not points[index - 1][1] == point[1] == points[index + 1][1]
    ]
    return "M" + "L".join(f"{x} {y}" for x, y in kept)
