"""`recnet bench`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table
from torch import nn

from recnets.cli.named import names_weights
from recnets.cli.output import console, count, table
from recnets.deploy.bench import Timing, bench, sizes
from recnets.experiments.latency import cpu_name
from recnets.models import create_model, load_weights, published
from recnets.utils import atomic_write, check_target, git_commit, positive_int, versions

RUNTIMES = ("onnxruntime", "openvino")


def command(
    models: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    device: Literal["cpu"] = "cpu",
    threads: int = 2,
    repeats: int = 50,
    image_size: int = 32,
    patience: float = 60.0,
    compile: bool = False,
    sizes: bool = False,
    out: Path | None = None,
) -> int:
    """Time models on this machine's CPU, a picture at a time, in PyTorch, ONNX Runtime and OpenVINO.

    All ways to run a model take turns in one run. Where other work takes the cores, runs with many small parallel
    parts wait most and ratios come out too large: turns in which others ran are left out, as far as --patience goes,
    and the last column says how much of a core others took in those that count.

    Args:
        models: names as `recnet info` takes them, without weights untrained and of 100 classes; by default every
            published model.
        device: where.
        threads: of each runtime.
        repeats: the least number of timed runs of each way, whose median is taken.
        image_size: side of the pictures.
        patience: seconds to wait, for each model, for turns that nothing disturbs.
        compile: also the optimized model through torch.compile, which takes minutes.
        sizes: no timing, only the bytes of weights and exported files.
        out: a CSV file for the results, or a folder, where its name tells the device and the versions.
    """
    for what, value in (("threads", threads), ("repeats", repeats), ("image_size", image_size)):
        positive_int(value, what)
    chosen = models or tuple(published())
    context = {"device": device, "cpu": cpu_name(), "threads": threads, "image_size": image_size, "repeats": repeats}
    if out is not None:
        out = check_target(out / _file_name(context, sizes) if out.is_dir() else out)
    if sizes:
        rows = _sizes(chosen, image_size)
    else:
        rows = []
        for name in chosen:
            options = {"repeats": repeats, "threads": threads, "compile": compile, "patience": patience}
            timings = bench(_model(name), (image_size, image_size), **options)  # type: ignore[arg-type]
            console().print(_table(name, timings))
            rows += [{"model": name, **asdict(timing)} for timing in timings]
    if out is not None:
        about = {**context, "commit": git_commit() or "", **_versions()}
        _write(out, [{**row, **about} for row in rows])
        console().out(f"wrote {out}")
    return 0


def _model(name: str) -> nn.Module:
    return load_weights(name)[0] if names_weights(name) else create_model(name, num_classes=100)


def _versions() -> dict[str, str]:
    found = versions()
    for name in RUNTIMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _file_name(context: dict[str, Any], sizes: bool) -> str:
    """ "latency-cpu-2-threads-Intel-Xeon-…-torch-2.13.0-onnxruntime-1.31.1.csv"."""
    known = _versions()
    parts = ["sizes"] if sizes else ["latency", context["device"], f"{context['threads']}-threads", context["cpu"]]
    parts += [f"{name}-{known[name]}" for name in ("torch", *RUNTIMES) if known.get(name)]
    return re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-") + ".csv"


def _table(name: str, timings: Sequence[Timing]) -> Table:
    columns = ("median ms", "best ms", "times plain", "file KB", "live KB", "others")
    made = table("", {name: "left"} | dict.fromkeys(columns, "right"))
    for t in timings:
        live = f"{t.live_bytes / 1e3:,.0f}" if t.live_bytes else ""
        times = f"{t.times_plain:.2f}"
        others = f"{100 * t.others:.0f} %"
        made.add_row(t.way, f"{t.median_ms:.2f}", f"{t.best_ms:.2f}", times, f"{t.file_bytes / 1e3:,.0f}", live, others)
    return made


def _sizes(names: Sequence[str], image_size: int) -> list[dict[str, Any]]:
    """Bytes, and in brackets how many times those of the float32 weights."""
    columns = ("parameters", "weights", "ONNX", "OpenVINO", "ONNX 8 bits")
    made = table("", {"bytes of": "left"} | dict.fromkeys(columns, "right"))
    rows = []
    for name in names:
        found = sizes(_model(name), (image_size, image_size))
        files = [f"{count(b)} ({b / found.weights:.3f})" if b else "" for b in (found.onnx, found.openvino, found.int8)]
        made.add_row(name, count(found.parameters), count(found.weights), *files)
        rows.append({"model": name, **asdict(found)})
    console().print(made)
    return rows


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(out, text.getvalue())
