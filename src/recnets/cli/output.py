"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

NARROWEST = 120  # a pipe or a log has no width of its own, and a table cut to 80 columns loses its figures


class _Console(Console):
    """Shows names as they are: a folder "[old] cats" or ":cat:" is neither markup nor an emoji."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def on_broken_pipe(self) -> None:
        """Rich would exit with the status of work that failed."""
        raise BrokenPipeError


def console() -> Console:
    """The console of standard output."""
    found = _Console()
    return found if found.is_terminal else _Console(max(found.width, NARROWEST))


def table(title: str, columns: dict[str, str], caption: str = "") -> Table:
    """An empty table; `columns` gives each heading its side, "left" or "right"."""
    made = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for heading, side in columns.items():
        made.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    return made


def print_json(value: Any) -> None:
    """Indented JSON and nothing else on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def count(number: int) -> str:
    """1704250 -> "1,704,250"."""
    return f"{number:,}"


def short(number: float) -> str:
    """863095936 -> "863.1M": three or four significant digits, for figures that are compared, not copied."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:g}"
