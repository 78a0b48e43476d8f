"""`recnet tables`: TABLES.md, the figures and report.html from the ledger."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recnets.errors import RecNetsError
from recnets.experiments import latency
from recnets.experiments.figure import draw_figure
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import DATASETS
from recnets.experiments.points import AXES, points
from recnets.experiments.report import write_report
from recnets.experiments.reproduce import parse_settings
from recnets.experiments.results import Results, collect
from recnets.experiments.runs import Protocol
from recnets.experiments.tables import write_tables
from recnets.utils import atomic_write, positive_int, require

FIGURES = {"parameters": "parameters", "macs": "multiply-adds", "latency": "CPU time"}


@dataclass(frozen=True)
class Tables:
    """Write TABLES.md, the figures (SVG and PNG) and report.html from the ledger in RESULTS/runs.

    A row is filled by the runs of its network with the table's recipe, whatever their seed and precision; runs by
    other settings are listed apart. The figures need the extra "plots".
    """

    results: Path = Path("results")
    """Folder of the ledger."""
    out: Path | None = None
    """Folder that everything is written into; the ledger's by default."""
    recipe: str | None = None
    """Fill the rows with runs by this recipe or TOML file, instead of each table's own."""
    set: tuple[str, ...] = ()
    """Settings in which those runs differ from it, KEY=VALUE each."""
    no_figures: bool = False
    """Leave the figures out."""
    latency: bool = False
    """Time every network on this CPU first, and keep it in RESULTS/latency.json."""
    threads: int = 1
    """CPU threads for --latency."""

    def __post_init__(self) -> None:
        positive_int(self.threads, "threads")

    def run(self) -> int:
        if not self.results.is_dir():
            raise RecNetsError(f"no folder {self.results} with a ledger: give --results (`recnet reproduce` makes one)")
        ledger = Ledger(self.results)
        out = self.out or self.results
        protocol = Protocol.of(self.recipe, parse_settings(self.set))
        results = collect(ledger, protocol, Path(os.path.relpath(ledger.runs, out)).as_posix())
        out.mkdir(parents=True, exist_ok=True)
        path = self.results / "latency.json"
        times = (
            latency.measure(path, shlex.join(["recnet", *sys.argv[1:]]), self.threads)
            if self.latency
            else latency.read(path)
        )
        atomic_write(out / "TABLES.md", write_tables(results))
        atomic_write(out / "report.html", write_report(results, times))
        written = [out / "TABLES.md", out / "report.html"]
        if not self.no_figures and _can_draw():
            written += _draw(results, times, out, protocol.label)
        for target in written:
            print(target)
        return 0


def _can_draw() -> bool:
    try:
        require("matplotlib", "plots")
    except RecNetsError as error:  # the tables are worth having without
        print(f"the figures are left out: {error}", file=sys.stderr)
        return False
    return True


def _draw(results: Results, times: dict[str, Any] | None, out: Path, label: str) -> list[Path]:
    written: list[Path] = []
    for dataset in ("cifar100", "cifar10"):
        found = points(results, times, dataset)
        if dataset != "cifar100" and not any(point.ours for point in found):
            continue  # the paper's figure is of CIFAR-100
        for axis in AXES:
            title = f"Accuracy on {DATASETS[dataset]} against {FIGURES[axis.name]}"
            title += f" (ours: {label})" if label else ""
            written += draw_figure(found, axis, out / f"{dataset}-{axis.name}", title)
    return written
