"""Classes of pictures, as the weights' own metadata say how to read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recnets.data.folder import SUFFIXES, read_picture
from recnets.deploy.check import normalise
from recnets.errors import RecNetsError
from recnets.models.weights import check_classes, image_size_of


@dataclass(frozen=True)
class Prediction:
    """A picture's best classes with their probabilities, or why it could not be read."""

    path: Path
    classes: list[tuple[str, float]]
    error: str | None = None


def pictures(paths: Iterable[Path]) -> Iterator[Path]:
    """The files; a folder stands for the pictures in it and below, sorted by name."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise RecNetsError(f"{path} holds no pictures ({', '.join(SUFFIXES)})")
        yield from found


def _reason(path: Path, error: Exception) -> str:
    """One line that names the file and what is wrong with it."""
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file"
    if path.is_file() and path.stat().st_size == 0:
        return f"{path}: the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return f"{path}: this is no picture of a known format, whatever its name says"
    if type(error).__name__ == "DecompressionBombError":
        return f"{path}: too many pixels to be unpacked safely ({error})"
    return f"{path}: cannot be read ({type(error).__name__}: {error})"


@torch.no_grad()
def predict(model: nn.Module, metadata: dict[str, Any], paths: Iterable[Path], top: int = 5) -> Iterator[Prediction]:
    """One prediction a picture, in order; a picture that cannot be read says so and the rest still runs."""
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    outputs = int(model.num_classes)  # type: ignore[arg-type]
    check_classes(outputs, metadata)
    names = metadata.get("classes") or [str(i) for i in range(outputs)]
    size = image_size_of(metadata)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield from _predictions(model, metadata, pictures(paths), size, names, min(top, outputs))
    finally:
        for module, training in modes.items():
            module.training = training


def _predictions(
    model: nn.Module, metadata: dict[str, Any], paths: Iterable[Path], size: tuple[int, int], names: list[str], top: int
) -> Iterator[Prediction]:
    for path in paths:
        try:
            image = read_picture(path, size, int(model.in_channels))  # type: ignore[arg-type]
        except RecNetsError:  # Pillow is missing, which no other picture will mend
            raise
        except Exception as error:  # decoders raise whatever a broken file leads them to
            yield Prediction(path, [], _reason(path, error))
            continue
        probabilities = model(normalise(image[None], metadata)).softmax(dim=1)[0]
        values, indices = probabilities.topk(top)
        yield Prediction(path, [(names[i], float(p)) for p, i in zip(values, indices.tolist(), strict=True)])
