"""Draws a Recurrent module with d = 4 segments, as the paper's Figure 1 describes it, to docs/img/recurrent.svg.

    python scripts/draw_recurrent.py

Colours sit on a card of their own, so the drawing reads the same on a light and on a dark page.
"""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "docs" / "img" / "recurrent.svg"

D = 4
WIDTH, HEIGHT = 1056, 586
CARD, INK, FAINT, LINE = "#fbfbf8", "#1f2933", "#6b7785", "#4a5663"
SEGMENTS = ("#3f7cac", "#2a9d8f", "#d1892b", "#b5546b")  # one hue a segment
WEIGHT, OUTPUT, PANEL = "#ffffff", "#5b4b8a", "#eef1ee"

COLUMNS = [286 + 184 * i for i in range(D)]  # centre of each segment's column
Y_X, Y_WX, Y_H, Y_A, Y_SUM = 62, 178, 282, 412, 512


def text(x: float, y: float, content: str, size: int = 17, colour: str = INK, **extra: str) -> str:
    options = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in extra.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{options}>{content}</text>'


def symbol(letter: str, index: str = "", size: int = 21, colour: str = INK) -> str:
    """A bold letter with a subscript, as the paper sets tensors."""
    low = f'<tspan font-size="{size * 0.66:.0f}" font-weight="400" dy="5">{index}</tspan>' if index else ""
    return f'<tspan font-weight="700" font-style="italic" font-size="{size}" fill="{colour}">{letter}</tspan>{low}'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = LINE) -> str:
    return (
        f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{colour}" stroke-width="2" fill="none" '
        'marker-end="url(#tip)"/>'
    )


def maps(cx: float, cy: float, count: int, colour: str, width: float = 64, height: float = 44) -> str:
    """A stack of feature maps seen at an angle; more sheets are more channels."""
    step = 5
    left, top = cx - (width + step * (count - 1)) / 2, cy - (height - step * (count - 1)) / 2
    sheets = []
    for i in reversed(range(count)):
        x, y = left + step * i, top - step * i
        sheets.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}" '
            f'fill-opacity="{1 if i == 0 else 0.45}" stroke="{CARD}" stroke-width="1.5"/>'
        )
    return "".join(sheets)


def face(cx: float, cy: float, count: int) -> tuple[float, float]:
    """Where the label of a stack goes: the middle of its front sheet."""
    return cx - 5 * (count - 1) / 2, cy + 5 * (count - 1) / 2 + 6


def kernel(cx: float, cy: float, label: str, *, shared: bool, width: float = 66) -> str:
    """A box for a convolution; weights that every step shares have a dashed edge."""
    dash = ' stroke-dasharray="5 4"' if shared else ""
    box = (
        f'<rect x="{cx - width / 2:g}" y="{cy - 19:g}" width="{width:g}" height="38" rx="8" fill="{WEIGHT}" '
        f'stroke="{LINE}" stroke-width="1.5"{dash}/>'
    )
    return box + text(cx, cy + 6, label, text_anchor="middle")


def panel(top: float, bottom: float, label: str) -> str:
    """A faint band behind the rows that are one layer of the paper."""
    left, right = COLUMNS[0] - 74, COLUMNS[-1] + 74
    return f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" rx="12" fill="{PANEL}"/>' + text(
        right + 14, top + 22, label, size=15, colour=FAINT, font_weight="600"
    )


def column(i: int) -> str:
    """x_i, W_x, h_i and A_i, from top to bottom."""
    cx, colour = COLUMNS[i], SEGMENTS[i]
    x_at, h_at = face(cx, Y_X, 2), face(cx, Y_H, 4)
    parts = [
        maps(cx, Y_X, 2, colour),
        text(*x_at, symbol("x", str(i), colour="#ffffff"), colour="#ffffff", text_anchor="middle"),
        arrow(cx, Y_X + 30, cx, Y_WX - 26),
        kernel(cx, Y_WX, symbol("W", "x"), shared=True),
        arrow(cx, Y_WX + 20, cx, Y_H - 38),
        maps(cx, Y_H, 4, colour, width=68),
        text(*h_at, symbol("h", str(i), colour="#ffffff"), colour="#ffffff", text_anchor="middle"),
        arrow(cx, Y_H + 34, cx, Y_A - 26),
        kernel(cx, Y_A, symbol("A", str(i)), shared=False),
        arrow(cx, Y_A + 20, cx, Y_SUM - 21),
    ]
    return "\n".join(parts)


def chain(i: int) -> str:
    """h_{i-1} through W_h into h_i."""
    left, right = COLUMNS[i - 1] + 43, COLUMNS[i] - 45
    middle = (left + right) / 2
    box = kernel(middle, Y_H, symbol("W", "h", size=19), shared=True, width=52)
    return arrow(left, Y_H, middle - 30, Y_H) + arrow(middle + 26, Y_H, right - 3, Y_H) + box


def total() -> str:
    """Σ h_i ⊛ A_i, then y."""
    nodes = []
    for i, cx in enumerate(COLUMNS):
        nodes.append(
            f'<circle cx="{cx}" cy="{Y_SUM}" r="14" fill="{CARD}" stroke="{LINE}" stroke-width="2"/>'
            + text(cx, Y_SUM + 7, "+", size=22, text_anchor="middle")
        )
        if i:
            nodes.append(arrow(COLUMNS[i - 1] + 14, Y_SUM, cx - 21, Y_SUM))
    end = COLUMNS[-1] + 152
    nodes.append(arrow(COLUMNS[-1] + 14, Y_SUM, end - 48, Y_SUM))
    nodes.append(maps(end, Y_SUM, 3, OUTPUT))
    nodes.append(text(*face(end, Y_SUM, 3), symbol("y", colour="#ffffff"), colour="#ffffff", text_anchor="middle"))
    return "\n".join(nodes)


def notes() -> str:
    """What each row is, at the left edge."""
    low = "<tspan dy='4' font-size='11'>{}</tspan><tspan dy='-4'>{}</tspan>".format
    rows = (
        (Y_X, "d = 4 segments of x", f"S{low('in', ' channels each')}"),
        (Y_WX, f"one W{low('x', ' for all')}", "3×3 convolution"),
        (Y_H, "hidden states", f"S{low('out', ' channels, BN + ReLU')}"),
        (Y_A, "a slice of A each", "1×1 convolution"),
        (Y_SUM, "running sum", f"C{low('out', ' channels')}"),
    )
    return "\n".join(
        text(26, y - 3, title, size=16, font_weight="600") + text(26, y + 18, more, size=14, colour=FAINT)
        for y, title, more in rows
    )


def draw() -> str:
    """The whole picture as SVG."""
    style = "font-family: 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
    tip = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{LINE}"/></marker></defs>'
    )
    title = "A Recurrent module with four segments: y is the sum over i of h_i convolved with A_i"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="{title}" style="{style}">',
            f"<title>{title}</title>",
            tip,
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="{CARD}"/>',
            panel(Y_WX - 38, Y_H + 50, "CRC layer"),
            panel(Y_A - 38, Y_SUM + 38, "Transition"),
            notes(),
            *(chain(i) for i in range(1, D)),
            *(column(i) for i in range(D)),
            total(),
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(draw(), encoding="utf-8")
    print(f"written to {OUT}")
