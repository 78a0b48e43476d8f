"""The data set that trained weights belong to, by what their own metadata say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recnets.data.base import DataSet
from recnets.data.load import load_dataset
from recnets.errors import RecNetsError
from recnets.utils import image_sides


def spec_of(metadata: Mapping[str, Any], data: str | None = None) -> str:
    """`data` if given, else what the weights were trained on."""
    spec = data or (metadata.get("recipe") or {}).get("data") or metadata.get("dataset")
    if not spec:
        raise RecNetsError("the weights do not say what they were trained on: give --data")
    return str(spec)


def data_of(
    metadata: Mapping[str, Any], data: str | None = None, data_dir: Path | None = None, max_bad: float | None = None
) -> DataSet:
    """The data set `spec_of(metadata, data)` at the weights' image size, split as in training, with their classes.

    max_bad: the share of unreadable pictures that a folder may have; as in training unless given.
    """
    spec = spec_of(metadata, data)
    size = metadata.get("image_size")
    side = None if size is None else _side(size)
    recipe = metadata.get("recipe") or {}
    seed = int(recipe.get("split_seed", 0))
    held_out = int(recipe.get("val", 0)) if spec == recipe.get("data") else 0  # other data may be fewer
    share = metadata.get("max_bad") if max_bad is None else max_bad
    allowed: dict[str, Any] = {} if share is None else {"max_bad": float(share)}
    found = load_dataset(spec, data_dir=data_dir, image_size=side, val=held_out, seed=seed, **allowed)
    classes = metadata.get("classes")
    if classes is not None and list(classes) != found.classes:
        raise RecNetsError(
            f"the weights were trained on {len(classes)} classes of {metadata.get('dataset', 'another data set')}, "
            f"{spec} has {found.num_classes} of its own: give the --data they were trained on"
        )
    return found


def _side(image_size: Any) -> int:
    """The side of the square pictures that weights were trained on."""
    height, width = image_sides(image_size)
    if height != width:
        raise RecNetsError(
            f"the weights were trained on pictures of {height}×{width}, and the data sets here are square: "
            "load such pictures yourself and use recnets.training.evaluate"
        )
    return height


def normalisation_of(metadata: Mapping[str, Any], data: DataSet | None = None) -> tuple[list[float], list[float]]:
    """(mean, std) of the weights, else of `data`."""
    known = metadata.get("normalisation") or {}
    if not known and data is None:
        raise RecNetsError("the weights do not say how pictures are normalised; train or save them with recnets")
    mean = list(known["mean"] if known else data.mean)  # type: ignore[union-attr]
    std = list(known["std"] if known else data.std)  # type: ignore[union-attr]
    if data is not None and len(mean) != data.in_channels:
        raise RecNetsError(f"the weights expect images of {len(mean)} channels, {data.name} has {data.in_channels}")
    return mean, std
