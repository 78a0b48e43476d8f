"""What training shows: lines where they are kept, a live bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

from rich.console import Console

from recnets.data import DataSet
from recnets.training import Recipe, RunOptions, train

Make = Callable[..., Recipe]


def test_plain_lines_when_the_output_is_no_terminal(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    screen = StringIO()
    console = Console(file=screen, width=60)
    train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options, console=console)
    lines = screen.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(word in lines[3] for word in ("loss", "train", "test", "lr", "images/s", "left"))
    assert "\x1b" not in screen.getvalue()


def test_live_bar_on_a_terminal(tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options, console=console)
    assert "━" in screen.getvalue()
    assert "images/s" in screen.getvalue()
