"""Times the Recurrent modules of a RecNet three ways, and measures the memory of their tensors.

- naive: separate modules as anyone would write them: an `nn.Conv2d` pair, add, `nn.BatchNorm2d` and ReLU a step, then
  `torch.cat` and the transition block.
- concat: `mode="concat"`, what training uses.
- stream: `mode="stream"`, what inference uses.

All three hold the same weights, and nothing is timed before their outputs agree. Runs are interleaved, so that another
program on the machine slows all of them alike; a ratio is the median of the ratios of the rounds.

    python benchmarks/layers.py --model recnet_60_1280 --batches 1 32
"""

from __future__ import annotations

import copy
import csv
import io
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from modules import NaiveRecurrent
from recnets import Recurrent, create_model
from recnets.models.profile import peak_live_bytes
from recnets.utils import atomic_write, git_commit, versions

RESULTS = Path(__file__).parent / "results"
WAYS = ("naive", "concat", "stream")


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """The same network three ways, with equal weights."""
    found: dict[str, nn.Module] = {}
    for way in WAYS:
        twin = nn.Sequential(copy.deepcopy(model))  # so that the module itself can be replaced
        for name, module in list(twin.named_modules()):
            if isinstance(module, Recurrent):
                if way == "naive":
                    twin.set_submodule(name, NaiveRecurrent(module))
                else:
                    module.mode = way
        found[way] = twin.to(next(model.parameters()).device)
    return found


def randomise(model: nn.Module) -> None:
    """Norms as after training, so that a mistake in one of them shows in the outputs."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def forward_backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    out = model(x)
    out.square().mean().backward()
    return out


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
    clock: str
    device: str
    threads: int
    torch: str
    python: str
    commit: str


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def measure(
    subject: str, model: nn.Module, x: Tensor, *, train: bool, rounds: int, min_time: float, clock: str
) -> list[Row]:
    """Time one thing the three ways."""
    work = forward_backward if train else forward
    models = {way: twin.train(train) for way, twin in variants(model).items()}
    with torch.random.fork_rng():
        check_equal(models, work, x)
    repeats = max(1, int(min_time / seconds(work, models["stream"], x, 2)))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            times[way].append(seconds(work, models[way], x, repeats, clock))
    peaks = {}
    for way in WAYS:
        with torch.set_grad_enabled(train):
            peaks[way] = peak_live_bytes(models[way], x)
    found = versions()
    return [
        Row(
            subject=subject,
            work="forward+backward" if train else "forward",
            batch=x.shape[0],
            way=way,
            milliseconds=round(1e3 * statistics.median(times[way]), 3),
            speedup_over_naive=round(
                statistics.median(n / t for n, t in zip(times["naive"], times[way], strict=True)), 3
            ),
            peak_live_bytes=peaks[way],
            peak_over_concat=round(peaks[way] / peaks["concat"], 3),
            clock=clock,
            device=device_name(x.device),
            threads=torch.get_num_threads(),
            torch=found["torch"],
            python=found["python"],
            commit=git_commit() or "",
        )
        for way in WAYS
    ]


def show(rows: list[Row]) -> None:
    table = Table(title=f"{rows[0].device}, {rows[0].threads} threads, {rows[0].clock} time, torch {rows[0].torch}")
    for heading in ("subject", "work", "batch", "way", "ms", "× naive's speed", "peak live MB", "÷ concat's"):
        table.add_column(heading, justify="left" if heading in ("subject", "work", "way") else "right")
    for i, row in enumerate(rows):
        table.add_row(
            *(row.subject, row.work, str(row.batch), row.way),
            f"{row.milliseconds:.2f}",
            f"{row.speedup_over_naive:.2f}",
            f"{row.peak_live_bytes / 1e6:.2f}",
            f"{row.peak_over_concat:.2f}",
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
    min_time: float = 0.2,
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
        train: time forward+backward too.
        modules: measure the first Recurrent module of each stage on its own too.
        threads: CPU threads; PyTorch's own choice by default.
        clock: wall is what a user waits; cpu (with one thread) is what to compare on a machine that others use too.
        device: where to run.
        out: folder for the CSV.
    """
    torch.manual_seed(0)
    if threads is not None:
        torch.set_num_threads(threads)
    network = create_model(model)
    randomise(network)
    network.to(device)
    subjects: list[tuple[str, nn.Module, tuple[int, ...]]] = [(model, network, (3, image_size, image_size))]
    if modules:
        for i, stage in enumerate(network.stages):
            crc, side = stage[0].crc, image_size // 2**i
            name = f"Rec({crc.s_in}, {crc.s_out}, {stage[0].transition.c_out}, {crc.d}) {side}×{side}"
            subjects.append((name, stage[0], (crc.d * crc.s_in, side, side)))
    rows: list[Row] = []
    for name, module, shape in subjects:
        for batch in batches:
            x = torch.randn(batch, *shape, device=device)
            for training in (False, True) if train else (False,):
                rows += measure(name, module, x, train=training, rounds=rounds, min_time=min_time, clock=clock)
    show(rows)
    print(f"written to {write(rows, out)}")


if __name__ == "__main__":
    tyro.cli(main)
