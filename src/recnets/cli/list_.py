"""`recnet list`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import tyro

from recnets.cli.output import console, count, print_json, short, table
from recnets.models import RecNet, create_model, list_models, model_info, published, read_metadata
from recnets.models.profile import count_macs, count_parameters
from recnets.utils import did_you_mean


def weights_of(name: str) -> list[dict[str, Any]]:
    """What is published for a network, or by a name with its tag: names, data sets and accuracies."""
    chosen = [full for full in published() if name in (full, full.split(".")[0])]
    return [weights_row(full, read_metadata(full)) for full in chosen]


def weights_row(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of one set of weights."""
    return {"name": name, "dataset": metadata.get("dataset"), "accuracy": metadata.get("accuracy")}


def weights_text(rows: list[dict[str, Any]]) -> str:
    """ "recnet_60_480.cifar100 (cifar100, 73.26 %), …", as far as it is known."""

    def about(row: dict[str, Any]) -> str:
        accuracy = "accuracy unknown" if row["accuracy"] is None else f"{row['accuracy']:.2f} %"
        return f"{row['name']} ({row['dataset'] or 'data unknown'}, {accuracy})"

    return ", ".join(about(row) for row in rows)


def describe(name: str, num_classes: int, image_size: int) -> dict[str, Any]:
    """What the list says of one model. Built without storage, so that the whole list takes seconds."""
    info = model_info(name)
    with torch.device("meta"):
        model = create_model(name, num_classes=num_classes)
        hidden = create_model(name, num_classes=num_classes, head="hidden") if isinstance(model, RecNet) else None
    row: dict[str, Any] = {
        "name": name,
        "title": info.title,
        "family": info.family,
        "parameters": count_parameters(model),
        "parameters_hidden_head": None if hidden is None else count_parameters(hidden),
        "paper_parameters": info.paper_params,
        "macs": count_macs(model, image_size),
        "note": info.note,
        "weights": weights_of(name),
    }
    if isinstance(model, RecNet):
        row |= {"e": model.e, "s": model.s, "d": model.d, "depth": model.depth, "width": model.width}
    return row


def command(
    pattern: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATTERN")] = "*",
    /,
    *,
    num_classes: int = 100,
    image_size: int = 32,
    json: bool = False,
) -> None:
    """Models that can be built by name, with their sizes.

    Parameters are those of the network in the paper's architecture table (linear head) and of the one its reported
    counts imply (hidden head), beside the figure the paper reports, for CIFAR-100.

    Args:
        pattern: shell pattern for the names, such as 'recnet_60*' (quote it).
        num_classes: outputs of the classifier.
        image_size: side of the picture that multiply-adds are counted for.
        json: print JSON, for programs.
    """
    names = list_models(pattern)
    if not names:
        near = did_you_mean(pattern, list_models())
        raise ValueError(f"no model matches {pattern!r}{near} (`recnet list` shows all)")
    rows = [describe(name, num_classes, image_size) for name in names]
    if json:
        print_json(rows)
        return
    right = ("e", "depth", "width", "params", "hidden head", "paper", "MACs")
    headings = ("name", "e", "S", "d", "depth", "width", "params", "hidden head", "paper", "MACs")
    columns = {heading: "right" if heading in right else "left" for heading in headings}
    shown = table(f"{len(rows)} models, {num_classes} classes, {image_size}×{image_size} pictures", columns)
    for i, row in enumerate(rows):
        recnet = row["family"] == "recnet" and "e" in row
        hidden = row["parameters_hidden_head"]
        shown.add_row(
            row["name"],
            str(row["e"]) if recnet else "",
            " ".join(map(str, row["s"])) if recnet else "",
            " ".join(map(str, row["d"])) if recnet else "",
            str(row["depth"]) if recnet else "",
            str(row["width"]) if recnet else "",
            count(row["parameters"]),
            "" if hidden is None else count(hidden),
            row["paper_parameters"] or "",
            short(row["macs"]),
            end_section=i + 1 < len(rows) and rows[i + 1]["family"] != row["family"],
        )
    console().print(shown)
    weights = [found for row in rows for found in row["weights"]]
    if weights:
        console().out(f"published weights: {weights_text(weights)}")
