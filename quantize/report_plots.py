"""The plots of a quantization report, as SVG text: no library, nothing from outside, readable in light and dark."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from llmq.profiles.svg import document, text

CELL, LABEL_WIDTH, HEADER = 20, 110, 18
BAR_WIDTH, BAR_HEIGHT = 520, 14

# (kind, layer) -> value
Grid = Mapping[tuple[str, int], float]


def heat_map(values: Grid, hints: Mapping[tuple[str, int], str], *, logarithmic: bool = True) -> str:
    """A cell for each kind of linear (rows) and layer (columns), darker the larger; `hints` show under a pointer."""
    if not values:
        return ""
    kinds = list(dict.fromkeys(kind for kind, _ in values))
    num_layers = max(layer for _, layer in values) + 1
    depth = _depths(list(values.values()), logarithmic)
    shapes = []
    for row, kind in enumerate(kinds):
        y = HEADER + row * CELL
        shapes.append(text(LABEL_WIDTH - 6, y + CELL * 0.7, kind, anchor="end"))
        for layer in range(num_layers):
            if (kind, layer) in values:
                opacity = depth(values[kind, layer])
                shapes.append(
                    f'<rect x="{LABEL_WIDTH + layer * CELL}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" '
                    f'style="fill:var(--bar)" fill-opacity="{opacity:.3f}">'
                    f"<title>{escape(hints[kind, layer])}</title></rect>"
                )
    for layer in range(0, num_layers, 5 if num_layers > 12 else 1):
        shapes.append(text(LABEL_WIDTH + (layer + 0.5) * CELL, HEADER - 6, str(layer), anchor="middle"))
    return document(LABEL_WIDTH + num_layers * CELL, HEADER + len(kinds) * CELL, shapes, "values by kind and layer")


def paired_bars(rows: Sequence[tuple[str, float, float, str]]) -> str:
    """For each (name, before, after, remark) a pale bar and a full one over it, on one scale from zero."""
    if not rows:
        return ""
    longest = max(max(before, after) for _, before, after, _ in rows) or 1.0
    shapes = []
    for number, (name, before, after, remark) in enumerate(rows):
        y = number * (BAR_HEIGHT + 10) + 4
        shapes.append(text(LABEL_WIDTH - 6, y + BAR_HEIGHT * 0.8, name, anchor="end"))
        for value, fill in ((before, "--ghost"), (after, "--bar")):
            width = BAR_WIDTH * value / longest
            shapes.append(
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" style="fill:var({fill})"/>'
            )
        end = LABEL_WIDTH + BAR_WIDTH * max(before, after) / longest
        shapes.append(text(end + 8, y + BAR_HEIGHT * 0.8, remark))
    return document(LABEL_WIDTH + BAR_WIDTH + 220, len(rows) * (BAR_HEIGHT + 10) + 8, shapes, "bytes before and after")


def _depths(values: Sequence[float], logarithmic: bool) -> Callable[[float], float]:
    """value -> 0.08 … 1, the range of the values that are above zero."""
    measure = (lambda v: math.log(v)) if logarithmic else (lambda v: v)
    usable = [measure(value) for value in values if value > 0 or not logarithmic]
    low, high = (min(usable), max(usable)) if usable else (0.0, 0.0)

    def depth(value: float) -> float:
        if (logarithmic and value <= 0) or high == low:
            return 0.08 if high != low else 0.5
        return 0.08 + 0.92 * (measure(value) - low) / (high - low)

    return depth
