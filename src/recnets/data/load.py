"""`load_dataset`: from a name like "cifar100" or "folder:PATH" to a data set in memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recnets.data import cifar, digits, folder
from recnets.data.base import DataSet, hold_out, resize
from recnets.utils import did_you_mean, positive_int

NAMES = ("digits", "cifar10", "cifar100")


def default_data_dir() -> Path:
    """`RECNETS_DATA`, or `recnets` in the user's cache folder."""
    if given := os.environ.get("RECNETS_DATA"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "recnets"


def load_dataset(
    spec: str,
    *,
    data_dir: Path | str | None = None,
    image_size: int | None = None,
    val: int = 0,
    seed: int = 0,
    download: bool = True,
    max_bad: float = 0.01,
) -> DataSet:
    """Read a whole data set into memory.

    Args:
        spec: "digits", "cifar10", "cifar100" or "folder:PATH".
        data_dir: where CIFAR lies or is put; default `RECNETS_DATA`, else the user's cache folder.
        image_size: side of the square images; default the set's own, 32 for a folder.
        val: number of training images to hold out, classes in proportion.
        seed: of the held-out split, and of the test split of a folder that brings none. The same seed gives the
            same split; evaluate with the one that was trained with.
        download: fetch CIFAR from its makers' site if it is missing.
        max_bad: the share of unreadable pictures in a folder above which loading stops.
    """
    if image_size is not None:
        positive_int(image_size, "image_size")
    kind, colon, path = spec.partition(":")
    if colon and kind == "folder":
        if not path:
            raise ValueError("folder: needs a path, for example folder:pictures")
        size = folder.DEFAULT_SIZE if image_size is None else image_size
        data = folder.load_folder(Path(path).expanduser(), image_size=size, seed=seed, max_bad=max_bad)
    elif spec == "digits":
        data = digits.load_digits()
    elif spec in cifar.SPECS:
        root = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        data = cifar.load_cifar(cifar.SPECS[spec], root, download=download)
    else:
        known = ", ".join(repr(name) for name in NAMES)
        raise ValueError(f"unknown data set {spec!r}: expected {known} or 'folder:PATH'{did_you_mean(spec, NAMES)}")
    if image_size is not None:
        data = resize(data, image_size)
    return hold_out(data, val, seed)
