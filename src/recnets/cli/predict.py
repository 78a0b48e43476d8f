"""`recnet predict`."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from recnets.cli.output import console
from recnets.deploy.predict import Prediction, predict
from recnets.models import load_weights

DEFAULT = "recnet_60_1280.cifar100"


def command(
    images: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    *,
    weights: str | None = None,
    top: int = 5,
    json: bool = False,
) -> int:
    """Classify pictures: any format, size, rotation or transparency, resized and normalised as the weights ask.

    A picture that cannot be read is named on stderr, the others are still classified, and the status is 1.

    Args:
        images: pictures, or folders of them.
        weights: a run folder, a weights file or a published name; by default recnet_60_1280.cifar100.
        top: classes to show for each picture.
        json: print JSON, for programs.
    """
    if not images:
        raise ValueError("give at least one picture or folder")
    if weights is None:
        weights = DEFAULT
        print(f"the classes are CIFAR-100's, by {DEFAULT}; --weights takes others", file=sys.stderr)
    model, metadata = load_weights(weights)
    found = list(predict(model, metadata, images, top))
    if json:
        rows = [
            {"image": str(p.path), "classes": [{"name": n, "probability": v} for n, v in p.classes], "error": p.error}
            for p in found
        ]
        print(json_module.dumps(rows, indent=2))
    else:
        _show([p for p in found if p.error is None])
    unread = [p for p in found if p.error is not None]
    for prediction in unread:
        print(f"error: {prediction.error}", file=sys.stderr)
    return 1 if unread else 0


def _show(found: list[Prediction]) -> None:
    if not found:
        return
    table = Table("picture", "class", "probability")
    table.columns[2].justify = "right"
    for prediction in found:
        for i, (name, probability) in enumerate(prediction.classes):
            table.add_row(str(prediction.path) if i == 0 else "", name, f"{100 * probability:.1f} %")
        table.add_section()
    console().print(table)
