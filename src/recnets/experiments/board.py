"""What `recnet reproduce` shows: a live table on a terminal, plain lines anywhere else (or without rich)."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recnets.experiments.job import Job, Result
from recnets.experiments.ledger import read_metrics
from recnets.experiments.plan import TRAIN_IMAGES, Step
from recnets.training import RunFolder

STATES = {
    "waiting": "waiting",
    "running": "running",
    "finished": "done",
    "failed": "failed",
    "lost": "failed",
    "epochs": "stopped as asked",
    "time": "time is up",
    "interrupted": "interrupted",
}
PLAIN_EVERY = 60.0
LIVE_EVERY = 0.5
STOPPED = ("epochs", "time", "interrupted")


def duration(seconds: float) -> str:
    """ "12 s", "7 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Line:
    """What is known of a run while the command works."""

    step: Step
    paper: float | None
    state: str = "waiting"
    epoch: int = 0
    accuracy: float | None = None
    began: float = 0.0
    ended: float = 0.0
    epochs_before: int = 0
    reason: str = ""

    @property
    def images(self) -> int:
        """Images of an epoch."""
        return TRAIN_IMAGES[self.step.run.dataset]

    def left(self) -> float:
        """Seconds of work that remain, by its own pace once it has one."""
        if self.state not in ("waiting", "running"):
            return 0.0
        epochs, here = self.step.run.recipe.epochs, self.epoch - self.epochs_before
        if self.state == "running" and here > 0:
            return (time.monotonic() - self.began) / here * (epochs - self.epoch)
        return self.step.seconds


class Board:
    """Keeps the state of all runs, hands results to `keep`, and shows it all.

    `keep` takes (job, result) and returns the result as it is to be shown. With `until`, a time.time(), a run that is
    not expected to end by then is not begun.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        papers: dict[str, float | None],
        work: Path,
        slots: int,
        keep: Callable[[Job, Result], Result],
        until: float | None = None,
    ) -> None:
        self.lines = {s.run.name: Line(s, papers.get(s.run.name), epoch=s.epochs_done) for s in steps}
        self.work, self.slots, self.keep, self.until = work, max(slots, 1), keep, until
        self._began = self._shown = time.monotonic()
        self._live = self._make_live()

    # -- what the engines call -------------------------------------------------------------------------------------

    def lets(self, job: Job) -> bool:
        """May it start? What was begun earlier may always go on."""
        line = self.lines[job.name]
        return self.until is None or line.epoch > 0 or time.time() + line.left() * self._slower() < self.until

    def started(self, job: Job) -> None:
        line = self.lines[job.name]
        line.state, line.began, line.epochs_before = "running", time.monotonic(), line.epoch
        where = f" from epoch {line.epoch + 1}" if 0 < line.epoch < line.step.run.recipe.epochs else ""
        self.say(f"start  {job.name}{where}")

    def ended(self, job: Job, result: Result) -> None:
        line = self.lines[job.name]
        self._read(line)
        line.ended = time.monotonic()
        result = self.keep(job, result)
        line.state, line.reason = result["status"], result.get("reason", "")
        if line.state == "finished":
            line.accuracy, line.epoch = result["entry"]["final_accuracy"], line.step.run.recipe.epochs
            self.say(f"done   {job.name}: {self._accuracy(line)}; {self._counts()}")
        elif line.state in STOPPED:
            self.say(f"stop   {job.name} after epoch {line.epoch}: {STATES[line.state]}")
        else:
            self.say(f"FAILED {job.name}: {line.reason}")

    def tick(self) -> None:
        every = PLAIN_EVERY if self._live is None else LIVE_EVERY
        if time.monotonic() - self._shown < every:
            return
        self._shown = time.monotonic()
        running = [line for line in self.lines.values() if line.state == "running"]
        for line in running:
            self._read(line)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif running:
            now = ", ".join(f"{line.step.run.name} {self._progress(line)}" for line in running)
            self.say(f"       {self._counts()}: {now}")

    # -- text ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Show the last state and leave the terminal as it was; the overall speed is for choosing --jobs."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None
        images = sum((line.epoch - line.epochs_before) * line.images for line in self.lines.values() if line.began)
        if images:
            rate = images / (time.monotonic() - self._began)
            self.say(f"{rate:,.0f} images/s over all runs of this call, with their starts and evaluations")

    @property
    def failures(self) -> list[Line]:
        return [line for line in self.lines.values() if line.state in ("failed", "lost")]

    @property
    def unfinished(self) -> list[Line]:
        return [line for line in self.lines.values() if line.state not in ("failed", "lost", "finished")]

    def left(self) -> float:
        """Seconds until all is done, with `slots` runs side by side."""
        each = [line.left() * (self._slower() if line.state == "waiting" else 1.0) for line in self.lines.values()]
        return max([sum(each) / self.slots, *each]) if each else 0.0

    def _slower(self) -> float:
        """How many times the estimate the runs of this call take, as far as they have come."""
        actual = expected = 0.0
        for line in self.lines.values():
            here = line.epoch - line.epochs_before
            if line.began and here > 0 and line.step.seconds > 0:
                share = here / max(line.step.run.recipe.epochs - line.epochs_before, 1)
                actual += (line.ended or time.monotonic()) - line.began
                expected += line.step.seconds * share
        return actual / expected if expected else 1.0

    def _counts(self) -> str:
        count = Counter(STATES[line.state] for line in self.lines.values())
        shown = ", ".join(f"{count[s]} {s}" for s in dict.fromkeys(STATES.values()) if count[s])
        return f"{shown}, about {duration(self.left())} left" if self.left() else shown

    def _read(self, line: Line) -> None:
        rows = read_metrics(RunFolder(self.work / line.step.run.name))
        if rows:
            line.epoch = rows[-1]["epoch"]
            line.accuracy = next((r["test_accuracy"] for r in reversed(rows) if "test_accuracy" in r), None)

    def _progress(self, line: Line) -> str:
        shown = f"epoch {line.epoch}/{line.step.run.recipe.epochs}"
        return shown if line.accuracy is None else f"{shown} {line.accuracy:.2f} %"

    def _accuracy(self, line: Line) -> str:
        if line.accuracy is None:
            return ""
        return f"{line.accuracy:.2f} %" + (f" (paper {line.paper:.2f})" if line.paper is not None else "")

    def _make_live(self) -> Any:
        if not sys.stdout.isatty():
            return None
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return None
        live = Live(self._table(), console=Console(), auto_refresh=False, transient=False)
        live.start()
        return live

    def _table(self) -> Any:
        """What runs, what failed, what was done last and what comes next, as far as the screen allows."""
        from rich.table import Table

        table = Table(title=self._counts(), title_justify="left", title_style="bold", expand=False)
        for name, justify in (("run", "left"), ("state", "left"), ("epoch", "right"), ("accuracy", "right"),
                              ("paper", "right"), ("left", "right")):  # fmt: skip
            table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
        styles = {"running": "cyan", "failed": "red", "lost": "red", "finished": "green", "waiting": "dim"}
        for line in self._visible():
            shown = STATES[line.state] + (f": {line.reason}" if line.reason else "")
            table.add_row(
                line.step.run.name,
                shown,
                f"{line.epoch}/{line.step.run.recipe.epochs}",
                "" if line.accuracy is None else f"{line.accuracy:.2f}",
                "" if line.paper is None else f"{line.paper:.2f}",
                duration(line.left()) if line.left() else "",
                style=styles.get(line.state, "yellow"),
            )
        return table

    def _visible(self, room: int = 8) -> list[Line]:
        every = list(self.lines.values())
        ended = [line for line in every if line.state not in ("running", "waiting", "failed", "lost")]
        waiting = [line for line in every if line.state == "waiting"]
        running = [line for line in every if line.state == "running"]
        return [*self.failures[-room:], *ended[-room:], *running, *waiting[:room]]
