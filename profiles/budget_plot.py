"""Memory against context as one HTML page: SVG, no library, nothing from outside, readable in light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from llmq.profiles.budget import Budget
from llmq.profiles.units import format_bytes

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 460, 80, 20, 190, 50
USERS = (1, 4, 16, 64)
_SHORTEST = 256  # tokens, where the plot begins
_STYLE = """
:root { --ink: #1d2430; --pale: #8a94a6; --grid: #dfe3ea; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --pale: #8a94a6; --grid: #2b3240; --paper: #14181f; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
""".strip()


@dataclass(frozen=True)
class Curve:
    """Bytes of one rank at each context length; `is_contrast`: what is not so, drawn pale."""

    name: str
    points: tuple[tuple[int, int], ...]  # (tokens, bytes)
    is_contrast: bool = False


def contexts(budget: Budget) -> list[int]:
    """Powers of two from 256 tokens on, up to the longest of the context asked for and the model's own."""
    longest = max(budget.num_tokens, budget.architecture.max_position_embeddings, 2 * _SHORTEST)
    return [*(1 << power for power in range(8, (longest - 1).bit_length())), longest]


def curves(budget: Budget) -> list[Curve]:
    """KV-cache and states on one rank for 1, 4, 16 and 64 users of each context, and for one without windows."""
    layout, lengths = budget.layout, contexts(budget)
    needed = [layout.needed_bytes(tokens) + layout.state_bytes for tokens in lengths]
    drawn = [
        Curve(
            f"{users} user{'s' * (users > 1)}",
            tuple((n, users * size) for n, size in zip(lengths, needed, strict=True)),
        )
        for users in USERS
    ]
    uniform = tuple((tokens, layout.bytes_per_token * tokens + layout.state_bytes) for tokens in lengths)
    if uniform != drawn[0].points:
        drawn.append(Curve("1 user, no windows", uniform, is_contrast=True))
    return drawn


def budget_page(model: str, budget: Budget) -> str:
    """The page. Both axes are logarithmic; a line marks the memory that is left for KV, where one is known."""
    limit = budget.memory.kv_cache_bytes if budget.memory and budget.memory.kv_cache_bytes > 0 else None
    drawn = curves(budget)
    ranks = f" on one of {budget.ranks} ranks" if budget.ranks > 1 else ""
    title = f"{model}: KV-cache against context{ranks}, in {budget.layout.groups[0].spec.dtype.name}"
    rows = "".join(f"<tr><td>{tokens:,}</td><td>{format_bytes(size)}</td></tr>" for tokens, size in drawn[0].points)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{_svg(drawn, limit, budget)}"
        f"<table><tr><th>tokens</th><th>one user</th></tr>{rows}</table></html>\n"
    )


def _svg(drawn: Sequence[Curve], limit: int | None, budget: Budget) -> str:
    tokens = [count for count, _ in drawn[0].points]
    sizes = [size for curve in drawn for _, size in curve.points] + ([limit] if limit else [])
    across = _log_scale(tokens[0], tokens[-1], LEFT, WIDTH - RIGHT)
    up = _log_scale(min(sizes), max(sizes), HEIGHT - BOTTOM, TOP)
    shapes = [*_grid(tokens, sizes, across, up)]
    for number, curve in enumerate(drawn):
        path = " ".join(f"{across(count):.1f},{up(size):.1f}" for count, size in curve.points)
        look = 'stroke="var(--pale)" stroke-dasharray="5 4"' if curve.is_contrast else f'stroke="{_color(number)}"'
        last = curve.points[-1]
        shapes.append(f'<polyline points="{path}" fill="none" stroke-width="2" {look}/>')
        shapes.append(_text(across(last[0]) + 8, up(last[1]) + 4, f"{curve.name}: {format_bytes(last[1])}"))
    if limit:
        y = up(limit)
        shapes.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-width="1.5"/>'
        )
        shapes.append(_text(LEFT + 6, y - 5, f"left for KV on {budget.memory.name}: {format_bytes(limit)}"))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory against context">{"".join(shapes)}</svg>'


def _grid(
    tokens: Sequence[int], sizes: Sequence[int], across: Callable[[float], float], up: Callable[[float], float]
) -> list[str]:
    shapes = []
    for count in tokens[::2] if len(tokens) > 10 else tokens:
        x = across(count)
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--grid)"/>')
        shapes.append(
            _text(x, HEIGHT - BOTTOM + 18, f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}", "middle")
        )
    for power in range(math.ceil(math.log2(min(sizes))), math.floor(math.log2(max(sizes))) + 1):
        if power % 2 == 0:
            y = up(2**power)
            shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
            shapes.append(_text(LEFT - 8, y + 4, format_bytes(2**power).replace(".0", ""), "end"))
    shapes.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "tokens of each user", "middle"))
    return shapes


def _color(number: int) -> str:
    return f"hsl({(210 + 47 * number) % 360} 60% 50%)"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A value between `low` and `high` -> a coordinate between `start` and `end`, logarithmically."""
    span = math.log(high) - math.log(low) or 1.0
    return lambda value: start + (end - start) * (math.log(value) - math.log(low)) / span
