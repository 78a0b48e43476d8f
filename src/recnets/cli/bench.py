"""`recnet bench`."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recnets.deploy.bench import Timing, bench
from recnets.models import RecNet, create_model, list_models, load_weights
from recnets.utils import atomic_write, git_commit, positive_int, versions


def command(
    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("recnet_60_480",),
    /,
    *,
    device: Literal["cpu"] = "cpu",
    threads: int = 2,
    repeats: int = 50,
    image_size: int = 32,
    out: Path | None = None,
) -> int:
    """Time RecNets on this machine's CPU, a picture at a time, in PyTorch and in ONNX Runtime.

    All ways to run a model take turns in one run. Use a quiet machine: where other work takes the cores, runs with
    many small parallel parts wait most, and ratios come out too large.

    Args:
        models: names (untrained, 100 classes), weights files or run folders.
        device: where.
        threads: of each runtime.
        repeats: runs of each way, whose median is taken.
        image_size: side of the pictures.
        out: a CSV file for the results.
    """
    for what, value in (("threads", threads), ("repeats", repeats), ("image_size", image_size)):
        positive_int(value, what)
    console, rows = Console(), []
    for name in models:
        model = create_model(name, num_classes=100) if name in list_models() else load_weights(name)[0]
        if not isinstance(model, RecNet):
            raise ValueError(f"bench takes RecNets, {name!r} is a {type(model).__name__}")
        timings = bench(model, (image_size, image_size), repeats=repeats, threads=threads)
        console.print(_table(name, timings))
        rows += [{"model": name, **asdict(timing)} for timing in timings]
    if out is not None:
        context = {"device": device, "threads": threads, "image_size": image_size, "repeats": repeats}
        _write(out, [{**row, **context, "commit": git_commit() or "", **versions()} for row in rows])
        console.print(f"wrote {out}", highlight=False)
    return 0


def _table(name: str, timings: list[Timing]) -> Table:
    table = Table(name, "median ms", "best ms", "times plain", "file KB", "live KB")
    for column in table.columns[1:]:
        column.justify = "right"
    for t in timings:
        live = f"{t.live_bytes / 1e3:,.0f}" if t.live_bytes else ""
        times = f"{t.times_plain:.2f}"
        table.add_row(t.way, f"{t.median_ms:.2f}", f"{t.best_ms:.2f}", times, f"{t.file_bytes / 1e3:,.0f}", live)
    return table


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(out, text.getvalue())
