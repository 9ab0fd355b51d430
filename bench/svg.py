"""Line charts as SVG text: the same figures give the same bytes, so that a check can tell whether a picture is up to
date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 300, 46, 12, 12, 44  # of a panel and its margins
LEGEND = 20  # height of a line of the legend
COLOURS = ("#1f6feb", "#d1242f", "#bf8700", "#1a7f37", "#8250df", "#57606a")
TICKS = 5  # about as many on an axis


@dataclass(frozen=True)
class Curve:
    """Points (x, y) from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: what its axes are, and its curves; x from 0 on, y from about the least."""

    x: str
    y: str
    curves: Sequence[Curve]


def drawn(panels: Sequence[Panel]) -> str:
    """Panels side by side; curves of one name have one colour and are named once, below. Ends in a newline."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    rows = -(-len(names) // len(panels))
    width, height = WIDTH * len(panels), HEIGHT + LEGEND * rows + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * i} 0)">', *_panel(panel, colours), "</g>"]
    for i, name in enumerate(names):
        x, y = LEFT + WIDTH * (i % len(panels)), HEIGHT + LEGEND * (i // len(panels)) + 8
        parts += [f'<path d="M{x} {y}h18" stroke="{colours[name]}" stroke-width="2"/>', _text(x + 24, y + 4, name)]
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about `TICKS` of them; the first is not above `low`."""
    rough = (high - low) / TICKS or 1.0
    unit = 10 ** floor(log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    first = floor(low / step + 1e-9)
    out = [first * step]
    while out[-1] < high - step * 1e-9:
        out.append((first + len(out)) * step)
    return out


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    xs, ys = ticks(0.0, max(x for x, _ in points)), ticks(min(y for _, y in points), max(y for _, y in points))
    at_x = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * x / xs[-1]
    at_y = lambda y: TOP + (HEIGHT - TOP - BOTTOM) * (ys[-1] - y) / (ys[-1] - ys[0])
    bottom, parts = at_y(ys[0]), []
    for x in xs:
        parts += [_line(f"M{at_x(x):.1f} {TOP}V{bottom:.1f}"), _text(at_x(x), bottom + 15, f"{x:.10g}", "middle")]
    for y in ys:
        parts += [_line(f"M{LEFT} {at_y(y):.1f}H{WIDTH - RIGHT}"), _text(LEFT - 5, at_y(y) + 4, f"{y:.10g}", "end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 32, panel.x, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 12 {middle:.1f})">{_text(12, middle, panel.y, "middle")}</g>')
    for curve in panel.curves:
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in curve.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colours[curve.name]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.5" fill="{colours[curve.name]}"/>'
            for x, y in curve.points
        ]
    return parts


def _line(path: str) -> str:
    return f'<path d="{path}" stroke="#d0d7de"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f">{escape(text)}</text>'
