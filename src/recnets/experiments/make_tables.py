"""`recnet tables`: TABLES.md, the figures and report.html from the ledger."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from recnets.experiments import latency
from recnets.experiments.figure import draw_figure
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import DATASETS
from recnets.experiments.points import AXES, points
from recnets.experiments.report import write_report
from recnets.experiments.reproduce import parse_settings
from recnets.experiments.results import collect
from recnets.experiments.runs import Protocol
from recnets.experiments.tables import write_tables
from recnets.utils import atomic_write

FIGURES = {"parameters": "parameters", "macs": "multiply-adds", "latency": "CPU time"}


@dataclass(frozen=True)
class Tables:
    """Write RESULTS/TABLES.md, the figures (SVG and PNG) and report.html from the ledger in RESULTS/runs.

    A row is filled by the runs of its network with the table's recipe, whatever their seed and precision; runs by
    other settings are listed apart. The figures need the extra "plots".
    """

    results: Path = Path("results")
    """Folder of the ledger; everything is written into it."""
    recipe: str | None = None
    """Fill the rows with runs by this recipe or TOML file, instead of each table's own."""
    set: tuple[str, ...] = ()
    """Settings in which those runs differ from it, KEY=VALUE each."""
    figures: bool = True
    """Draw the figures."""
    latency: bool = False
    """Time every network on this CPU first, and keep it in RESULTS/latency.json."""
    threads: int = 1
    """CPU threads for --latency."""

    def run(self) -> int:
        ledger = Ledger(self.results)
        results = collect(ledger, Protocol.of(self.recipe, parse_settings(self.set)))
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / "latency.json"
        times = latency.measure(path, shlex.join(sys.argv), self.threads) if self.latency else latency.read(path)
        atomic_write(self.results / "TABLES.md", write_tables(results))
        atomic_write(self.results / "report.html", write_report(results, times))
        written = [self.results / "TABLES.md", self.results / "report.html"]
        if self.figures:
            for dataset in ("cifar100", "cifar10"):
                found = points(results, times, dataset)
                if dataset != "cifar100" and not any(point.ours for point in found):
                    continue  # the paper's figure is of CIFAR-100
                for axis in AXES:
                    title = f"Accuracy on {DATASETS[dataset]} against {FIGURES[axis.name]}"
                    written += draw_figure(found, axis, self.results / f"{dataset}-{axis.name}", title)
        for target in written:
            print(target)
        return 0
