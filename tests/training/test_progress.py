"""What training shows: lines where they are kept, a live bar on a terminal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from recnets.data import DataSet
from recnets.training import Recipe, RunOptions, train
from recnets.training.progress import Display

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


class Terminal:
    """A console whose writes can be read again, without what moves the cursor and colours the text."""

    def __init__(self) -> None:
        self.screen = StringIO()
        self.console = Console(file=self.screen, force_terminal=True, width=100)

    @property
    def lines(self) -> list[str]:
        plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", self.screen.getvalue())
        return [line for line in re.split(r"[\r\n]+", plain) if line]

    @property
    def bars(self) -> list[tuple[str, int]]:
        """("2/3", 40) for every drawn bar: the epoch and the percentage."""
        found = [re.match(r"epoch (\d+/\d+) .*[━╸╺].* (\d+)%", line) for line in self.lines]
        return [(match[1], int(match[2])) for match in found if match]


def test_live_bar_on_a_terminal(tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions) -> None:
    """Few steps an epoch and rare looks at the loss, as with the digits: still, every epoch moves the bar."""
    seldom, terminal = dataclasses.replace(options, check_steps=50), Terminal()
    train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=seldom, console=terminal.console)
    assert terminal.bars[0] == ("1/3", 0)
    assert terminal.bars[-1] == ("3/3", 100)
    assert {("2/3", 33), ("3/3", 67)} <= set(terminal.bars)
    epochs = [line for line in terminal.lines if re.match(r"epoch \d/3  loss", line)]
    assert [line.split("  ")[0] for line in epochs] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(word in epochs[0] for word in ("test", "lr 0.05000", "images/s"))
    assert max(len(line) for line in epochs) <= 80


def test_the_bar_starts_where_a_resumed_run_does(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    first, terminal = dataclasses.replace(options, epochs_until=2), Terminal()
    train(make_recipe(), out=tmp_path, data=stripes_data, options=first)
    train(make_recipe(), out=tmp_path, resume=True, data=stripes_data, options=options, console=terminal.console)
    assert terminal.bars[0] == ("3/3", 67)
    assert terminal.bars[-1] == ("3/3", 100)


def test_the_bar_moves_by_the_clock_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("recnets.training.progress.time.monotonic", lambda: now[0])
    display = Display(Terminal().console, epochs=2, steps=1000, start=0)
    assert display.bar is not None
    seen = []
    for step in range(1, 101):
        now[0] += 0.01
        display.moved(1, step)
        seen.append(display.bar.tasks[0].completed)
    display.close()
    assert seen[-1] >= 1090
    assert 5 <= len(set(seen)) <= 12  # about ten times a second, not at every step
    assert display.bar.tasks[0].fields["epoch"] == 2


def test_what_is_said_at_the_start(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    beyond = dataclasses.replace(options, epochs_until=40)
    said = []
    for _ in range(2):
        screen = StringIO()
        console = Console(file=screen, width=300)
        recipe = make_recipe(epochs=1)
        train(recipe, out=tmp_path, resume=True, data=stripes_data, options=beyond, console=console)
        said.append(screen.getvalue())
    assert "cpu (1 thread), in" in said[0]
    assert "--epochs-until 40 changes nothing: the recipe ends after 1 epoch\n" in said[0]
    assert "% after 1 epoch in" in said[0]
    assert "it ended after 1 epoch, nothing is left to train" in said[1]
    assert "going on" not in said[1]
