"""What the benchmarks share: where results go, what their names carry, and CSV files that say how they were made."""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from recnets.utils import atomic_write, git_commit, versions

RESULTS = Path(__file__).parent / "results"


def context(device: torch.device | str) -> str:
    """For file names: "nvidia-h200-torch2.11.0-triton3.6.0"."""
    on_cuda = torch.device(device).type == "cuda"
    found = versions()
    words = [torch.cuda.get_device_name(device).lower() if on_cuda else "cpu"]
    return file_name(*words, *(f"{name}{found[name]}" for name in ("torch", "triton") if name in found))


def file_name(*words: str) -> str:
    """Words joined by dashes, without what file systems and shells dislike."""
    return re.sub(r"[^A-Za-z0-9._+]+", "-", "-".join(words))


def origin(*notes: str) -> str:
    """Comment lines: the command, the commit, and notes. Folders of this machine mean nothing elsewhere."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    return "".join(f"# {line}\n" for line in (f"{command}; commit {git_commit()}", *notes))


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], *notes: str) -> None:
    """Comment lines on the file's origin, then the rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, origin(*notes) + text.getvalue())
