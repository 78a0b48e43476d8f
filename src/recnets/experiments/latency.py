"""Time of one picture on the CPU for every network of the tables, kept in a file with what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from recnets.errors import RecNetsError
from recnets.experiments.cost import SHAPES, build
from recnets.experiments.paper import PAPER_TABLES, TABLES
from recnets.utils import atomic_write, git_commit, versions

FORMAT = 1
DATASET = "cifar100"
WARMUP, LEAST, MOST, SECONDS = 3, 10, 200, 1.0


def cpu_name() -> str:
    """The processor by its own name, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def time_model(model: str, overrides: Mapping[str, Any]) -> list[float]:
    """Milliseconds of single forward passes of one picture: at least `LEAST`, for about a second."""
    _, channels, side = SHAPES[DATASET]
    network = build(model, overrides, DATASET, "cpu").eval()
    x = torch.randn(1, channels, side, side)
    times: list[float] = []
    with torch.inference_mode():
        for _ in range(WARMUP):
            network(x)
        began = time.perf_counter()
        while len(times) < LEAST or (len(times) < MOST and time.perf_counter() - began < SECONDS):
            start = time.perf_counter()
            network(x)
            times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(path: Path, command: str, threads: int = 1, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Time every network of the paper's tables and write the file."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = []
    try:
        for key, (model, overrides) in _networks().items():
            times = time_model(model, overrides)
            best, median = min(times), statistics.median(times)
            rows.append(
                {
                    "network": key,
                    "model": model,
                    "overrides": overrides,
                    "median_ms": round(median, 4),
                    "least_ms": round(best, 4),
                    "passes": len(times),
                }
            )
            say(f"{key}: median {median:.2f} ms, least {best:.2f} ms of {len(times)} passes")
    finally:
        torch.set_num_threads(before)
    record = {
        "format": FORMAT,
        "what": "one 32×32 picture, forward pass, fp32, eager PyTorch",
        "device": cpu_name(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions(),
        "commit": git_commit(),
        "command": command,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def _networks() -> dict[str, tuple[str, dict[str, Any]]]:
    rows = [row for name in PAPER_TABLES for row in TABLES[name].rows]
    return {row.title: (row.model, dict(row.overrides)) for row in rows}


def read(path: Path) -> dict[str, Any] | None:
    """The file as it is, None where there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecNetsError(f"{path} cannot be read: {error}; `recnet tables --latency` writes it anew") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RecNetsError(f"{path} is not a file of latencies; `recnet tables --latency` writes it anew")
    return record


def by_network(record: Mapping[str, Any] | None) -> dict[str, float]:
    """Milliseconds by the network's title. The least of the passes: what disturbs a measurement only adds."""
    return {} if record is None else {row["network"]: row["least_ms"] for row in record["rows"]}
