"""A folder of the user's own pictures as a data set: one folder a class, any size and any mode."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recnets.data.base import DataSet, Split, channel_stats, stratified_split
from recnets.errors import RecNetsError
from recnets.utils import check_utf8, require

DEFAULT_SIZE = 32
TEST_SHARE = 0.2  # where the folder brings no test pictures
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_LAYOUT_HELP = "expected PATH/train/CLASS/*.png (or jpg, webp) and, if you like, PATH/val/CLASS/…"

log = logging.getLogger(__name__)


def read_picture(path: Path | str, size: tuple[int, int], channels: int = 3) -> Tensor:
    """A picture of any mode as uint8 (channels, H, W), upright, resized to `size` = (H, W) with antialiasing.

    Transparent parts become white, as they look on a page; 16-bit grey keeps its upper 8 bits; of an animation the
    first frame is taken. channels: 3 (RGB) or 1 (grey).
    """
    if channels not in (1, 3):
        raise ValueError(f"a picture can be read with 3 channels (RGB) or 1 (grey), got {channels}")
    pil: Any = require("PIL.Image", extra="data")
    ops: Any = require("PIL.ImageOps", extra="data")
    with pil.open(path) as opened:
        image = ops.exif_transpose(opened)
        if image.mode.startswith(("I", "F")):  # convert() would clip 16-bit values to white
            grey = np.asarray(image).astype(np.float64)
            grey = grey / 257 if image.mode.startswith("I") else grey
            image = pil.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
        if "A" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            image = pil.alpha_composite(pil.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if channels == 3 else "L")
        height, width = size
        image = image.resize((width, height), pil.Resampling.BILINEAR)  # Pillow's resize antialiases
        array = np.array(image).reshape(height, width, channels)
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))


@dataclass
class _Pictures:
    """The files of one split, and where in the list of classes each belongs."""

    folder: Path
    paths: list[Path]
    labels: list[int]


def load_folder(path: Path, *, image_size: int = DEFAULT_SIZE, seed: int = 0, max_bad: float = 0.01) -> DataSet:
    """`path`/train and `path`/val or `path`/test (if both, val is the held-out split), or class folders in `path`.

    Without val and test a fifth of the pictures, by `seed` and with classes in proportion, is the test split.
    """
    if not 0 <= max_bad <= 1:
        raise ValueError(f"max_bad is a share from 0 to 1, got {max_bad}")
    if not path.is_dir():
        raise RecNetsError(f"no folder {path}: {_LAYOUT_HELP}")
    require("PIL.Image", extra="data")  # before any picture is counted as unreadable for want of it
    folders = {name: path / name for name in ("train", "val", "test") if (path / name).is_dir()}
    if "train" not in folders:
        if folders:
            raise RecNetsError(f"{path} has {' and '.join(folders)} but no train: {_LAYOUT_HELP}")
        folders["train"] = path
    classes = sorted(entry.name for entry in _visible(folders["train"]) if entry.is_dir())
    if len(classes) < 2:
        raise RecNetsError(f"{folders['train']} has {len(classes)} class folders, expected at least 2: {_LAYOUT_HELP}")
    for name in (str(path), *classes):
        check_utf8(name)  # weights and reports hold them; a picture's own name is free
    found = {name: _find_pictures(folder, classes) for name, folder in folders.items()}
    splits, skipped = _read_all(found, classes, image_size, max_bad)
    train, test = splits["train"], splits.get("test", splits.get("val"))
    val = splits["val"] if "test" in splits and "val" in splits else None
    mean_of = train
    if test is None:
        count = min(len(train) - 1, max(1, round(TEST_SHARE * len(train))))
        rest, held = stratified_split(train.labels, count, seed)
        mean_of = train.take(rest)
        train, test = mean_of, train.take(held)
    mean, std = channel_stats(mean_of.images)
    return DataSet(f"folder:{path}", train, test, val, classes, mean, std, skipped)


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise RecNetsError(f"cannot read {folder}: {error.strerror or error}") from error


def _find_pictures(folder: Path, classes: Sequence[str]) -> _Pictures:
    """All pictures below each class folder, in sorted order."""
    unknown = sorted({entry.name for entry in _visible(folder) if entry.is_dir()} - set(classes))
    if unknown:
        raise RecNetsError(f"{folder} has the class {unknown[0]!r}, which the training pictures do not have")
    pictures, others = _Pictures(folder, [], []), 0
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            log.warning("%s has no pictures of the class %r", folder, name)
            continue
        files = sorted(
            file
            for file in (folder / name).rglob("*")
            if file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder / name).parts)
        )
        chosen = [file for file in files if file.suffix.lower() in SUFFIXES]
        if not chosen:
            raise RecNetsError(f"the class folder {folder / name} has no pictures ({', '.join(SUFFIXES)})")
        others += len(files) - len(chosen)
        pictures.paths += chosen
        pictures.labels += [label] * len(chosen)
    if others:
        log.warning("%s: %d files are not pictures (%s) and were left out", folder, others, ", ".join(SUFFIXES))
    if not pictures.paths:
        raise RecNetsError(f"{folder} has no pictures: {_LAYOUT_HELP}")
    return pictures


def _read_all(
    found: dict[str, _Pictures], classes: Sequence[str], size: int, max_bad: float
) -> tuple[dict[str, Split], list[str]]:
    """Read every picture; returns the splits and a line for each one that could not be read."""

    def read(path: Path) -> Tensor | str:
        try:
            return read_picture(path, (size, size))
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise anything from OSError to SyntaxError
            return f"{path}: {error or type(error).__name__}"

    splits, skipped = {}, []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding releases the interpreter lock
        for name, pictures in found.items():
            results = list(pool.map(read, pictures.paths))
            skipped += [result for result in results if isinstance(result, str)]
            images = [result for result in results if not isinstance(result, str)]
            labels = [
                label for result, label in zip(results, pictures.labels, strict=True) if not isinstance(result, str)
            ]
            if images:
                splits[name] = Split(torch.stack(images), torch.tensor(labels, dtype=torch.int64))
    _judge(found, classes, splits, skipped, max_bad)
    return splits, skipped


def _judge(
    found: dict[str, _Pictures], classes: Sequence[str], splits: dict[str, Split], skipped: list[str], max_bad: float
) -> None:
    """Stop for too many unreadable pictures or a class that lost all of its own; otherwise list them."""
    total = sum(len(pictures.paths) for pictures in found.values())
    listed = "\n".join(f"  {line}" for line in skipped[:10]) + ("\n  …" if len(skipped) > 10 else "")
    if len(skipped) / total > max_bad:
        raise RecNetsError(
            f"{len(skipped)} of {total} pictures cannot be read, more than max_bad = {max_bad:.2%}; "
            f"repair or remove them, or raise max_bad:\n{listed}"
        )
    for name, pictures in found.items():
        left = set(splits[name].labels.tolist()) if name in splits else set()
        lost = sorted(set(pictures.labels) - left)
        if lost:
            raise RecNetsError(
                f"no picture of the class {classes[lost[0]]!r} in {pictures.folder} can be read:\n{listed}"
            )
    if skipped:
        log.warning("%d of %d pictures cannot be read and were skipped:\n%s", len(skipped), total, listed)
