"""The scripts of benchmarks/ as tests run them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: object, hidden: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """A script in a process of its own, in which the packages `hidden` cannot be imported."""
    start = f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden!r})); sys.path.insert(0, {str(FOLDER)!r}); "
    start += f"sys.argv = sys.argv[1:]; runpy.run_path({str(FOLDER / name)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", start, name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
