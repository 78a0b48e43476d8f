"""What a run shows while it works: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported where there is a console to draw on: a run without one needs none
    from rich.console import Console
    from rich.progress import Progress

EVERY = 0.1  # seconds between two moves of the bar


def duration(seconds: float) -> str:
    """ "0:07", "12:34", "1:02:03"."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, what: str) -> str:
    """ "1 epoch", "2 epochs"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


class Display:
    """Draws the progress of a run; silent with `console=None` (other processes than the main one)."""

    def __init__(self, console: Console | None, epochs: int, steps: int, start: int) -> None:
        """`start`: steps done already, of epochs · steps in all."""
        self.console, self.epochs, self.steps = console, epochs, steps
        self.start, self.began = start, time.monotonic()
        self.bar: Progress | None = None
        self.status, self._moved = "", 0.0
        if console is not None and console.is_terminal:
            self.bar = _bar(console)
            self.task = self.bar.add_task("", total=epochs * steps, epochs=epochs, epoch=0, status="starting")
            self._show(*divmod(start, steps))
            self.bar.start()

    def remaining(self, done: int) -> str:
        """Time left by the speed since the start or resume, evaluation included."""
        if done <= self.start:
            return "?"
        pace = (time.monotonic() - self.began) / (done - self.start)
        return duration(pace * (self.epochs * self.steps - done))

    def moved(self, epoch: int, step: int) -> None:
        """`step` steps of epoch `epoch` (from 0) are done. Cheap enough for every step: it only looks at the clock."""
        if self.bar is not None and time.monotonic() - self._moved >= EVERY:
            self._show(epoch, step)

    def measured(self, epoch: int, step: int, loss: float, rate: float) -> None:
        """The same, with the mean loss of the epoch so far, which the device had to be asked for."""
        self.status = f"loss {loss:.3f} · {rate:,.0f} images/s"
        self._show(epoch, step)

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch has ended; `row` is its line of metrics. Its line stays, above the bar if there is one."""
        judged = "val" if "val_accuracy" in row else "test"
        accuracy = row.get(f"{judged}_accuracy")
        words = [
            f"epoch {row['epoch']:{len(str(self.epochs))}}/{self.epochs}",
            f"loss {row['train_loss']:.4f}",
            f"train {row['train_accuracy']:6.2f} %" if self.bar is None else "",  # 80 columns hold the rest
            f"{judged} {accuracy:6.2f} %" if accuracy is not None else "",
            f"lr {row['lr']:.5f}",
            f"{row['images_per_second']:,.0f} images/s",
            f"{self.remaining(row['epoch'] * self.steps)} left" if self.bar is None else "",  # the bar says it
        ]
        self.measured(row["epoch"], 0, row["train_loss"], row["images_per_second"])
        if self.bar is not None:
            self.bar.refresh()
        self.say("  ".join(word for word in words if word))

    def _show(self, epoch: int, step: int) -> None:
        if self.bar is None:
            return
        self._moved = time.monotonic()
        done = epoch * self.steps + step
        left = f"{self.remaining(done)} left" if done > self.start else "starting"
        status = f"{self.status} · {left}" if self.status else left
        self.bar.update(self.task, completed=done, epoch=min(epoch + 1, self.epochs), status=status)

    def say(self, message: str, style: str = "") -> None:
        """A line that stays."""
        if self.console is not None:
            from rich.text import Text

            self.console.print(Text(message, style=style), soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _bar(console: Console) -> Progress:
    """One line, whatever the width of the terminal: what does not fit is cut."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    return Progress(
        TextColumn("[bold cyan]epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(bar_width=20, complete_style="cyan", finished_style="green"),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}", style="dim", table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
    )
