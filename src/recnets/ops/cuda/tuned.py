"""Plans that were measured to be faster than those that plan.py works out, by `benchmarks/plans.py --keep`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from recnets.errors import RecNetsError
from recnets.utils import atomic_write

FILE = Path(__file__).with_name("tuned.json")
KEY = ("kernel", "n", "h", "w", "si", "so", "kx", "kh", "multiprocessors")
STEP = ("images", "rows", "nb", "wm", "wn", "mt", "nt", "resident", "prefetch", "stacked", "wide", "buffers")
GRAD = ("images", "rows", "groups", "stages", "staggered", "wide")
Choice = Mapping[str, Any]


def fields_of(kernel: str) -> tuple[str, ...]:
    """What is chosen for a kernel."""
    return GRAD if kernel == "weight_grad" else STEP


def key_of(kernel: str, layer: Any, multiprocessors: int) -> dict[str, Any]:
    """What a plan depends on: a layer (`plan.Layer`) without its number of steps, on a device."""
    sizes = {name: getattr(layer, name) for name in KEY[1:-1]}
    return {"kernel": kernel, **sizes, "multiprocessors": multiprocessors}


def _read(file: Path) -> dict[tuple[Any, ...], Choice]:
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        for entry in entries:
            lacking = set(fields_of(entry["kernel"])) - entry.keys()
            if lacking:
                raise KeyError(*sorted(lacking))
        return {tuple(entry[name] for name in KEY): entry for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecNetsError(f"{file} holds no plans ({error!r}); remove it, or write it anew with --keep") from error


@cache
def _all() -> dict[tuple[Any, ...], Choice]:
    return _read(FILE)


def choice(kernel: str, layer: Any, multiprocessors: int) -> Choice | None:
    """The plan that was kept for this layer, as plain numbers."""
    return _all().get(tuple(key_of(kernel, layer, multiprocessors).values()))


def keep(entries: Iterable[Choice], file: Path = FILE) -> None:
    """Add plans to those that are kept; each takes the place of an older one for the same layer."""
    with _alone(file.parent):
        found = _read(file) | {tuple(entry[name] for name in KEY): entry for entry in entries}
        lines = ",\n".join(json.dumps(found[key]) for key in sorted(found))
        atomic_write(file, f"[\n{lines}\n]\n")
    _all.cache_clear()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process keeps plans meanwhile: what it adds would be lost."""
    import fcntl  # where there are CUDA kernels there is Linux

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
