"""What a run shows while it works: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported where there is a console to draw on: a run without one needs none
    from rich.console import Console
    from rich.progress import Progress


def duration(seconds: float) -> str:
    """ "0:07", "12:34", "1:02:03"."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display:
    """Draws the progress of a run; silent with `console=None` (other processes than the main one)."""

    def __init__(self, console: Console | None, epochs: int, steps: int, start: int) -> None:
        """`start`: steps done already, of epochs · steps in all."""
        self.console, self.epochs, self.steps = console, epochs, steps
        self.start, self.began = start, time.monotonic()
        self.bar: Progress | None = None
        self.note = ""
        if console is not None and console.is_terminal:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self.bar = Progress(
                TextColumn("[bold cyan]epoch {task.fields[epoch]}/{task.fields[epochs]}"),
                BarColumn(bar_width=28, complete_style="cyan", finished_style="green"),
                TaskProgressColumn(),
                TextColumn("{task.fields[status]}", style="dim"),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task(
                "", total=epochs * steps, completed=start, epoch=1, epochs=epochs, status="starting"
            )
            self.bar.start()

    def remaining(self, done: int) -> str:
        """Time left by the speed since the start or resume, evaluation included."""
        if done <= self.start:
            return "?"
        pace = (time.monotonic() - self.began) / (done - self.start)
        return duration(pace * (self.epochs * self.steps - done))

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float, rate: float) -> None:
        """`step` steps of epoch `epoch` (from 0) are done."""
        if self.bar is None:
            return
        done = epoch * self.steps + step
        status = f"loss {loss:.3f} · train {accuracy:.1f} %{self.note} · lr {lr:.4f} · {rate:,.0f} images/s"
        self.bar.update(self.task, completed=done, epoch=epoch + 1, status=f"{status} · {self.remaining(done)} left")

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch has ended; `row` is its line of metrics."""
        judged = "val" if "val_accuracy" in row else "test"
        accuracy = row.get(f"{judged}_accuracy")
        if accuracy is not None:
            self.note = f" · {judged} {accuracy:.2f} %"
        if self.bar is not None or self.console is None:
            return
        shown = f"{judged} {accuracy:6.2f} %  " if accuracy is not None else ""
        width = len(str(self.epochs))
        self.say(
            f"epoch {row['epoch']:{width}}/{self.epochs}  loss {row['train_loss']:.4f}  "
            f"train {row['train_accuracy']:6.2f} %  {shown}lr {row['lr']:.5f}  "
            f"{row['images_per_second']:,.0f} images/s  {self.remaining(row['epoch'] * self.steps)} left"
        )

    def say(self, message: str, style: str = "") -> None:
        """A line that stays."""
        if self.console is not None:
            from rich.text import Text

            self.console.print(Text(message, style=style), soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
