"""Times the Recurrent modules of a RecNet three ways, and measures the memory of their tensors.

- naive: separate modules as anyone would write them: an `nn.Conv2d` pair, add, `nn.BatchNorm2d` and ReLU a step, then
  `torch.cat` and the transition block.
- concat: `mode="concat"`, what training uses.
- stream: `mode="stream"`, what inference uses.

All three hold the same weights, and nothing is timed before their outputs agree. They take turns, so that another
program on the machine slows all of them alike. On a CPU each has a process of its own, as for a user who runs only it:
in one process malloc keeps memory that another way freed, and plain modules, which take and give back the most, look
faster than they are. There a ratio is one of medians, and `others` is the largest share of a core that other programs
took meanwhile. On a GPU, or by CPU time, all run in one process, and a ratio is the median of the ratios of the rounds.

    python benchmarks/layers.py --model recnet_60_1280 --batches 1 32
"""

from __future__ import annotations

import csv
import io
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from modules import WAYS, forward, forward_backward, network, runner, variant
from recnets.deploy.turns import TIMED, Turn, time_in_turns
from recnets.models.profile import peak_live_bytes
from recnets.utils import atomic_write, git_commit, versions

RESULTS = Path(__file__).parent / "results"


def check_equal(models: dict[str, nn.Module], work: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> None:
    """Refuse to time things that do not compute the same."""
    expected = work(models["naive"], x)
    for way in WAYS[1:]:
        got = work(models[way], x)
        error = (got - expected).abs().max() / expected.abs().max()
        if not error < 1e-3:
            raise SystemExit(f"{way} differs from naive by {error:.2e} of the largest output; nothing was timed")


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(
    work: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor, repeats: int, clock: str = "wall"
) -> float:
    """Seconds of one call, the average of a few in a row."""
    now = CLOCKS[clock]
    if x.is_cuda:
        torch.cuda.synchronize()
    start = now()
    for _ in range(repeats):
        work(model, x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (now() - start) / repeats


@dataclass
class Row:
    """A line of the results."""

    subject: str
    work: str
    batch: int
    way: str
    milliseconds: float
    speedup_over_naive: float
    peak_live_bytes: int
    peak_over_concat: float
    others: float
    clock: str
    device: str
    threads: int
    torch: str
    python: str
    commit: str


@dataclass(frozen=True)
class Subject:
    """What is timed: a network, or the first Recurrent module of a stage of it."""

    title: str
    model: str
    stage: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Effort:
    """How long to time."""

    rounds: int
    min_time: float
    patience: float
    clock: str


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def in_one_process(
    models: dict[str, nn.Module], work: Callable[[nn.Module, Tensor], Tensor], x: Tensor, effort: Effort
) -> dict[str, Turn]:
    repeats = max(1, int(effort.min_time / seconds(work, models["stream"], x, 2)))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(effort.rounds):
        for way in WAYS:
            times[way].append(seconds(work, models[way], x, repeats, effort.clock))
    return {way: (0.0, taken) for way, taken in times.items()}


def measure(subject: Subject, batch: int, device: str, *, train: bool, effort: Effort) -> list[Row]:
    """Time one thing the three ways."""
    work = forward_backward if train else forward
    x = torch.randn(batch, *subject.shape, device=device)
    models = {way: variant(subject.model, subject.stage, way, train).to(device) for way in WAYS}
    with torch.random.fork_rng():
        check_equal(models, work, x)
    if x.is_cuda or effort.clock == "cpu":
        found = in_one_process(models, work, x, effort)
        naive = found["naive"][1]
        ratios = {
            way: statistics.median(n / t for n, t in zip(naive, taken, strict=True))
            for way, (_, taken) in found.items()
        }
    else:
        found = time_in_turns(
            {way: partial(runner, subject.model, subject.stage, way, train) for way in WAYS},
            tuple(x.shape),
            threads=torch.get_num_threads(),
            repeats=max(2 * TIMED, int(effort.min_time * effort.rounds / seconds(work, models["stream"], x, 2))),
            patience=effort.patience,
        )
        ratios = {way: statistics.median(found["naive"][1]) / statistics.median(found[way][1]) for way in WAYS}
    peaks = {}
    for way in WAYS:
        with torch.set_grad_enabled(train):
            peaks[way] = peak_live_bytes(models[way], x)
    about = versions()
    return [
        Row(
            subject=subject.title,
            work="forward+backward" if train else "forward",
            batch=batch,
            way=way,
            milliseconds=round(1e3 * statistics.median(found[way][1]), 3),
            speedup_over_naive=round(ratios[way], 3),
            peak_live_bytes=peaks[way],
            peak_over_concat=round(peaks[way] / peaks["concat"], 3),
            others=round(found[way][0], 3),
            clock=effort.clock,
            device=device_name(x.device),
            threads=torch.get_num_threads(),
            torch=about["torch"],
            python=about["python"],
            commit=git_commit() or "",
        )
        for way in WAYS
    ]


def show(rows: list[Row]) -> None:
    table = Table(title=f"{rows[0].device}, {rows[0].threads} threads, {rows[0].clock} time, torch {rows[0].torch}")
    for heading in ("subject", "work", "batch", "way", "ms", "× naive's speed", "peak live MB", "÷ concat's", "others"):
        table.add_column(heading, justify="left" if heading in ("subject", "work", "way") else "right")
    for i, row in enumerate(rows):
        table.add_row(
            *(row.subject, row.work, str(row.batch), row.way),
            f"{row.milliseconds:.2f}",
            f"{row.speedup_over_naive:.2f}",
            f"{row.peak_live_bytes / 1e6:.2f}",
            f"{row.peak_over_concat:.2f}",
            f"{100 * row.others:.0f} %",
            end_section=i % len(WAYS) == len(WAYS) - 1,
        )
    Console(width=120).print(table)


def write(rows: list[Row], folder: Path) -> Path:
    """A CSV whose name says where it comes from."""
    folder.mkdir(parents=True, exist_ok=True)
    context = f"{rows[0].device}-{rows[0].threads}threads-{rows[0].clock}-torch{rows[0].torch}-python{rows[0].python}"
    path = folder / f"layers-{re.sub(r'[^A-Za-z0-9.]+', '-', context)}.csv"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows(astuple(row) for row in rows)
    atomic_write(path, text.getvalue())
    return path


def main(
    model: str = "recnet_60_1280",
    batches: tuple[int, ...] = (1, 32),
    image_size: int = 32,
    rounds: int = 9,
    min_time: float = 0.1,
    patience: float = 20.0,
    train: bool = True,
    modules: bool = True,
    threads: int | None = None,
    clock: Literal["wall", "cpu"] = "wall",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    out: Path = RESULTS,
) -> None:
    """Time naive, concat and stream.

    Args:
        model: a RecNet by name, with separate BN and zero padding.
        batches: pictures in a batch.
        image_size: side of the pictures.
        rounds: rounds of interleaved runs.
        min_time: seconds that one way runs in a round, at least.
        patience: seconds to wait, for each thing timed, for turns that no other program disturbs (CPU).
        train: time forward+backward too.
        modules: measure the first Recurrent module of each stage on its own too.
        threads: CPU threads; PyTorch's own choice by default.
        clock: wall is what a user waits; cpu (with one thread) is what to compare on a machine that others use too.
        device: where to run.
        out: folder for the CSV.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    subjects = [Subject(model, model, None, (3, image_size, image_size))]
    if modules:
        for i, stage in enumerate(network(model).stages):
            crc, side = stage[0].crc, image_size // 2**i
            title = f"Rec({crc.s_in}, {crc.s_out}, {stage[0].transition.c_out}, {crc.d}) {side}×{side}"
            subjects.append(Subject(title, model, i, (crc.d * crc.s_in, side, side)))
    effort = Effort(rounds, min_time, patience, clock)
    rows: list[Row] = []
    for subject in subjects:
        for batch in batches:
            for training in (False, True) if train else (False,):
                rows += measure(subject, batch, device, train=training, effort=effort)
    show(rows)
    print(f"written to {write(rows, out)}")


if __name__ == "__main__":
    tyro.cli(main)
