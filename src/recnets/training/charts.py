"""Drawings for the report as inline SVG and PNG, with nothing but the standard library and numpy."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from torch import Tensor

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 14, 38


@dataclass(frozen=True)
class Line:
    """A curve; None where there is no value. `style` is a class of the page's style sheet."""

    name: str
    values: Sequence[float | None]
    style: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low … high."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def line_chart(lines: Sequence[Line], epochs: Sequence[int], *, unit: str = "", from_zero: bool = False) -> str:
    """Curves over epochs with a grid, and each epoch's numbers where the pointer is."""
    known = [v for line in lines for v in line.values if v is not None and math.isfinite(v)]
    if not known or not epochs:
        return "<p class=muted>no data</p>"
    marks = ticks(0.0 if from_zero else min(known), max(known))
    low, high = marks[0], marks[-1]
    first, last = epochs[0], max(epochs[-1], epochs[0] + 1)

    def x(epoch: float) -> float:
        return LEFT + (epoch - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for mark in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y(mark) + 3.5:.1f}">{mark:g}{unit}</text>')
    for mark in ticks(first, last, 6):
        if first <= mark <= last and mark == int(mark):
            parts.append(f'<text class="tick mid" x="{x(mark):.1f}" y="{HEIGHT - BOTTOM + 18}">{mark:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick mid" x="{middle}" y="{HEIGHT - 3}">epoch</text>')
    parts += [_curve(line, epochs, x, y) for line in lines]
    parts += _hover(lines, epochs, x, unit)
    return "".join(parts) + "</svg>"


def _curve(line: Line, epochs: Sequence[int], x, y) -> str:  # type: ignore[no-untyped-def]
    points = [(x(e), y(v)) for e, v in zip(epochs, line.values, strict=True) if v is not None and math.isfinite(v)]
    if not points:
        return ""
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    end_x, end_y = points[-1]
    return (
        f'<polyline class="curve {line.style}" points="{path}"/>'
        f'<circle class="dot {line.style}" cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/>'
    )


def _hover(lines: Sequence[Line], epochs: Sequence[int], x, unit: str) -> list[str]:  # type: ignore[no-untyped-def]
    width = (WIDTH - LEFT - RIGHT) / max(len(epochs), 1)
    parts = []
    for i, epoch in enumerate(epochs):
        shown = [f"{line.name} {line.values[i]:.4g}{unit}" for line in lines if line.values[i] is not None]
        parts.append(
            f'<rect class="hit" x="{x(epoch) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>epoch {epoch}: {escape(", ".join(shown))}</title></rect>'
        )
    return parts


def ramp(share: np.ndarray) -> np.ndarray:
    """Shares 0 … 1 as uint8 RGB (…, 3), from near-white over teal to deep blue."""
    stops = np.array([0.0, 0.02, 0.15, 0.5, 1.0])
    colours = np.array([[244, 247, 249], [208, 231, 230], [124, 195, 194], [38, 122, 149], [16, 52, 92]])
    return np.stack([np.interp(share, stops, colours[:, c]) for c in range(3)], axis=-1).round().astype(np.uint8)


def confusion_chart(confusion: Tensor, classes: Sequence[str]) -> str:
    """Rows: true classes; columns: predictions; colour: share of the row. Numbers where they are readable."""
    counts = confusion.numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = len(counts)
    if size > 24:
        image = png_uri(ramp(shares))
        return f'<img class="pixels matrix" alt="confusion matrix, {size} by {size}" src="{image}">'
    side, left, top = 400 / size, 16 + 6 * min(max(len(c) for c in classes), 14), 20
    parts = [f'<svg viewBox="0 0 {left + 402} {top + 424}" role="img">']
    parts.append(f'<text class="tick mid" x="{left + 200}" y="{top - 7}">predicted</text>')
    for i in range(size):
        middle = top + (i + 0.5) * side
        parts.append(f'<text class="tick end" x="{left - 6}" y="{middle + 3.5:.1f}">{escape(classes[i][:14])}</text>')
        label_x = left + (i + 0.5) * side
        shown = escape(classes[i][: max(2, int(side / 6.5))])
        parts.append(f'<text class="tick mid" x="{label_x:.1f}" y="{top + 417}">{shown}</text>')
        for j in range(size):
            red, green, blue = ramp(shares[i, j])
            fill = f'fill="rgb({red},{green},{blue})"' if counts[i, j] else 'class="empty"'
            title = f"{classes[i]} taken for {classes[j]}" if i != j else f"{classes[i]} recognised"
            parts.append(
                f'<rect x="{left + j * side:.1f}" y="{top + i * side:.1f}" width="{side - 1.5:.1f}" '
                f'height="{side - 1.5:.1f}" rx="2" {fill}>'
                f"<title>{escape(title)}: {counts[i, j]} of {counts[i].sum()}</title></rect>"
            )
            if counts[i, j]:
                ink = "#fff" if shares[i, j] > 0.3 else "#123"
                parts.append(
                    f'<text class="cell" fill="{ink}" x="{left + (j + 0.5) * side - 0.7:.1f}" '
                    f'y="{middle + 3.3:.1f}">{counts[i, j]}</text>'
                )
    return "".join(parts) + "</svg>"


def png_uri(pixels: np.ndarray) -> str:
    """uint8 (H, W, 3) or grey (H, W) as a data URI."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    raw = b"".join(b"\x00" + row.tobytes() for row in rows)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def picture_uri(image: Tensor) -> str:
    """One uint8 image (C, H, W), grey or colour."""
    pixels = image.cpu().numpy()
    if len(pixels) == 1:
        return png_uri(pixels[0])
    return png_uri(np.moveaxis(pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, 0), 0, -1))
