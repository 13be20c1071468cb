"""Plots as SVG text: no library, nothing from outside. Colours are the page's CSS variables, light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 40


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def document(width: float, height: float, shapes: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg>'
    )


@dataclass(frozen=True)
class Series:
    """Points (x, y) as a "line", as "steps" (y holds until the next x) or as "dots", in the CSS variable `color`."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "--bar"
    style: str = "line"


@dataclass(frozen=True)
class Axis:
    """A direction of a plot: its values mapped to 0 … 1, linearly from zero or by their logarithm."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool = False) -> "Axis":
        """From 0, or in a logarithm from a little below the lowest above 0, to a little above the highest."""
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
        if not is_log:
            return cls(min([0.0, *usable]), 1.05 * max([0.0, *usable]) or 1.0)
        low, high = (min(usable), max(usable)) if usable else (1.0, 10.0)
        return cls(low / 1.1, high * 1.1, True)

    def place(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low)
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Four to eight round values within it; of a logarithm 1, 2 and 5 times powers of ten."""
        if self.is_log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
            found = [step * 10.0**exponent for exponent in exponents for step in steps]
            return [value for value in found if self.low <= value <= self.high]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """The series over one pair of axes, with a legend where several have names, and dashed horizontal `limits`."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    x_axis = Axis.over([x for x, _ in points], is_log=log_x)
    y_axis = Axis.over([y for _, y in points] + [value for _, value in limits])

    def x_of(value: float) -> float:
        return _LEFT + x_axis.place(value) * (WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - _BOTTOM - y_axis.place(value) * (HEIGHT - _TOP - _BOTTOM)

    shapes = [text(_LEFT, 14, y_label), text(WIDTH - _RIGHT, HEIGHT - 6, x_label, "end")]
    shapes += _grid(x_axis, y_axis, x_of, y_of)
    for name, value in limits:
        shapes.append(_line(_LEFT, y_of(value), WIDTH - _RIGHT, y_of(value), "--warn", dashes="5 4"))
        shapes.append(text(WIDTH - _RIGHT, y_of(value) - 4, name, "end"))
    for one in series:
        shapes.append(_drawn(one, x_of, y_of))
    named = [one for one in series if one.name]
    if len(named) > 1:
        shapes += _legend(named)
    return document(WIDTH, HEIGHT, shapes, title)


def _grid(x_axis: Axis, y_axis: Axis, x_of: Callable, y_of: Callable) -> list[str]:
    shapes = []
    for tick in x_axis.ticks():
        shapes.append(_line(x_of(tick), _TOP, x_of(tick), HEIGHT - _BOTTOM, "--line"))
        shapes.append(text(x_of(tick), HEIGHT - _BOTTOM + 14, f"{tick:,.6g}", "middle"))
    for tick in y_axis.ticks():
        shapes.append(_line(_LEFT, y_of(tick), WIDTH - _RIGHT, y_of(tick), "--line"))
        shapes.append(text(_LEFT - 6, y_of(tick) + 4, f"{tick:,.6g}", "end"))
    return shapes


def _drawn(one: Series, x_of: Callable, y_of: Callable) -> str:
    places = [(x_of(x), y_of(y)) for x, y in one.points]
    if one.style == "dots":
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places)
        return f'<g style="fill:var({one.color})" fill-opacity="0.75">{dots}</g>'
    if one.style == "steps":
        before = [places[0], *places[:-1]]
        places = [place for (x, y), (_, last_y) in zip(places, before, strict=True) for place in ((x, last_y), (x, y))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" style="fill:none;stroke:var({one.color});stroke-width:1.8"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    shapes, x = [], WIDTH - _RIGHT - sum(7 * len(one.name) + 26 for one in series)
    for one in series:
        shapes.append(f'<rect x="{x:.0f}" y="6" width="10" height="10" style="fill:var({one.color})"/>')
        shapes.append(text(x + 14, 15, one.name))
        x += 7 * len(one.name) + 26
    return shapes


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashes: str = "") -> str:
    dashed = f";stroke-dasharray:{dashes}" if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="stroke:var({color}){dashed}"/>'
