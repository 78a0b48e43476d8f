"""The size-accuracy figure as SVG and PNG: ours filled, the paper's hollow, names beside the points."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recnets.experiments.points import FAMILIES, Axis, Point
from recnets.utils import atomic_write, require

SIZE = (8.6, 5.6)  # inches; at README width a point of text stays a point
DPI = 200  # also when measuring names: hinting makes their width depend on it
FONT = 8.0
INK, MUTED, GRID = "#1d2733", "#66737f", "#e4e9ee"


def draw_figure(points: Sequence[Point], axis: Axis, path: Path, title: str) -> list[Path]:
    """Write PATH.svg and PATH.png; nothing where no point has a value on this axis."""
    shown = [p for p in points if p.places(axis.name)]
    if not shown:
        return []
    matplotlib: Any = require("matplotlib", "plots")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings: Any = {"svg.fonttype": "path", "svg.hashsalt": "recnets", "font.family": "DejaVu Sans", "font.size": FONT}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=SIZE, dpi=DPI, layout="constrained")
        try:
            _dress(axes, axis, shown, title)
            _scatter(axes, shown, axis.name)
            figure.draw_without_rendering()
            _name_points(axes, shown, axis.name)
            written = []
            for kind in ("svg", "png"):
                target = path.with_suffix(f".{kind}")
                buffer = io.BytesIO()
                metadata = {"Date": None} if kind == "svg" else None  # the same points give the same file
                figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
                atomic_write(target, buffer.getvalue())
                written.append(target)
        finally:
            plt.close(figure)
    return written


def _dress(axes: Any, axis: Axis, shown: Sequence[Point], title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = [place for p in shown for place in p.places(axis.name)]
    xs, ys = [x for _, x, _ in places], [y for _, _, y in places]
    axes.set_xscale("log")
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.45)
    margin = max((max(ys) - min(ys)) * 0.07, 0.5)
    axes.set_ylim(min(ys) - margin, max(ys) + margin)
    axes.xaxis.set_major_locator(FixedLocator([b * 10**e for e in range(-2, 5) for b in (1, 2, 5)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(axis.label, color=INK, fontsize=FONT + 1.5)
    axes.set_ylabel("Test accuracy (%)", color=INK, fontsize=FONT + 1.5)
    axes.set_title(title, loc="left", color=INK, fontsize=FONT + 3, fontweight="bold", pad=10)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=FONT + 0.5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color("#b8c2cb")
    present = [f for f in FAMILIES if any(p.family == f for p in shown)]

    def key(colour: str, label: str, filled: bool = True) -> Any:
        face = colour if filled else "white"
        return Line2D([], [], marker="o", linestyle="", color=colour, markerfacecolor=face, markersize=6, label=label)

    families = [key(FAMILIES[f][1], FAMILIES[f][0]) for f in present]
    kinds = [key(INK, "ours"), key(INK, "the paper's", filled=False)]
    axes.legend(
        handles=[*kinds, *families], loc="lower right", frameon=True, facecolor="white", edgecolor=GRID, framealpha=1.0,
        fontsize=FONT, labelcolor=INK, ncols=2, handletextpad=0.2, columnspacing=1.0, borderpad=0.7,
    )  # fmt: skip


def _scatter(axes: Any, shown: Sequence[Point], axis: str) -> None:
    for point in shown:
        colour = FAMILIES[point.family][1]
        places = point.places(axis)
        if len(places) == 2:
            axes.plot(
                [x for _, x, _ in places], [y for _, _, y in places], color=colour, linewidth=0.9, alpha=0.5, zorder=2
            )
        for kind, x, y in places:
            face = colour if kind == "ours" else "white"
            size = 44 if point.family == "recnet" else 34
            axes.scatter(
                x, y, s=size, facecolor=face, edgecolor=colour, linewidth=1.4, zorder=4 if kind == "ours" else 3
            )


def _name_points(axes: Any, shown: Sequence[Point], axis: str) -> None:
    """A name beside each network, where it covers no point, no other name and not the legend, if there is room."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    taken = [axes.get_legend().get_window_extent(renderer)]
    for point in shown:
        for _, x, y in point.places(axis):
            px, py = axes.transData.transform((x, y))
            taken.append(Bbox.from_extents(px - 4 * scale, py - 4 * scale, px + 4 * scale, py + 4 * scale))
    frame = axes.get_window_extent(renderer)
    for point in sorted(shown, key=lambda p: p.family != "recnet"):
        _, x, y = point.places(axis)[-1]
        label = axes.text(0, 0, point.title, fontsize=FONT - 0.5, color=FAMILIES[point.family][1], zorder=5)
        box = label.get_window_extent(renderer)
        px, py = axes.transData.transform((x, y))
        best = min(_spots(box.width, box.height, scale), key=lambda spot: _penalty(spot, px, py, box, taken, frame))
        left, bottom = px + best[0], py + best[1]
        label.set_position(axes.transData.inverted().transform((left, bottom)))
        taken.append(Bbox.from_bounds(left, bottom, box.width, box.height))
        _tie(axes, (px, py), taken[-1], scale, FAMILIES[point.family][1])


def _tie(axes: Any, point: tuple[float, float], box: Any, scale: float, colour: str) -> None:
    """A thin line from a point to a name that had to move away from it."""
    near = [min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)]
    gap = math.dist(point, near)
    if gap <= 6.5 * scale:
        return
    start = [p + (n - p) * 4.2 * scale / gap for p, n in zip(point, near, strict=True)]
    ends = axes.transData.inverted().transform([start, near])
    axes.plot(ends[:, 0], ends[:, 1], color=colour, linewidth=0.6, alpha=0.7, zorder=2)


def _spots(width: float, height: float, scale: float) -> list[tuple[float, float]]:
    """Lower left corners around a point, the nicest first."""
    gap = 5 * scale
    spots = []
    for far in (1.0, 1.7, 2.6):
        away = gap * far
        spots += [
            (away, -height * 0.35),
            (-width - away, -height * 0.35),
            (-width / 2, away),
            (-width / 2, -height - away * 0.9),
            (away * 0.7, away * 0.6),
            (away * 0.7, -height - away * 0.4),
            (-width - away * 0.7, away * 0.6),
            (-width - away * 0.7, -height - away * 0.4),
        ]
    return spots


def _penalty(
    spot: tuple[float, float], px: float, py: float, box: Any, taken: Sequence[Any], frame: Any
) -> tuple[float, float]:
    """Covered area first, then the distance from the point."""
    left, bottom = px + spot[0], py + spot[1]
    right, top = left + box.width, bottom + box.height
    covered = 0.0
    for other in taken:
        wide, high = min(right, other.x1) - max(left, other.x0), min(top, other.y1) - max(bottom, other.y0)
        if wide > 0 and high > 0:
            covered += wide * high
    outside = max(frame.x0 - left, 0) + max(right - frame.x1, 0) + max(frame.y0 - bottom, 0) + max(top - frame.y1, 0)
    middle = (left + box.width / 2 - px) ** 2 / 9 + (bottom + box.height / 2 - py) ** 2
    return covered + outside * 100, middle
