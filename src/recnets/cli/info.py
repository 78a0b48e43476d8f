"""`recnet info`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table

from recnets.cli.list_ import weights_of, weights_text
from recnets.cli.output import console, count, print_json, short, table
from recnets.models import ModelInfo, Profile, RecNet, create_model, model_info, profile, published, read_metadata
from recnets.models.registry import canonical_name


def record(name: str) -> ModelInfo | None:
    """The registered record, also of published weights; None for the paper's notation."""
    try:
        return model_info(canonical_name(name.split(".")[0] if name in published() else name))
    except ValueError:
        return None


def command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    /,
    *,
    head: Literal["linear", "hidden"] | None = None,
    image_size: int = 32,
    num_classes: int | None = None,
    in_channels: int = 3,
    json: bool = False,
) -> None:
    """One model layer by layer: output, parameters and multiply-adds, then the whole: memory and receptive field.

    Args:
        name: a network or published weights that `recnet list` shows, or 'RecNet(4, 8, 16, 32, 10, 10, 10)'.
        head: classifier of a RecNet: linear is the paper's table (default), hidden what its parameter counts imply.
        image_size: side of the picture in pixels.
        num_classes: outputs of the classifier; those of published weights, else 100.
        in_channels: channels of the picture.
        json: print JSON, for programs.
    """
    overrides: dict[str, Any] = {} if head is None else {"head": head}
    if num_classes is None:
        num_classes = read_metadata(name)["model"]["num_classes"] if name in published() else 100
    with torch.device("meta"):  # nothing is computed, so nothing need be stored
        model = create_model(name, num_classes=num_classes, in_channels=in_channels, **overrides)
    found = profile(model, image_size)
    known = record(name)
    if json:
        print_json(_as_json(name, model, known, found))
        return
    out = console()
    out.print(_layers(known.title if known else name, found))
    out.print(_summary(name, model, known, found))


def _as_json(name: str, model: torch.nn.Module, known: ModelInfo | None, found: Profile) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": known.name if known else name,
        "title": known.title if known else name,
        "paper_parameters": known.paper_params if known else None,
        "note": known.note if known else "",
        "weights": _weights(name, known),
    }
    if isinstance(model, RecNet):
        result |= {"e": model.e, "s": model.s, "d": model.d, "head": model.head}
        result |= {"depth": model.depth, "width": model.width}
    return result | found.to_dict()


def _layers(title: str, found: Profile) -> Table:
    """The paper's architecture table, with what each layer costs."""
    columns = {"Layer/Block": "left", "Output Channels": "right", "Output Size": "right"}
    shown = table(title, {**columns, "Params": "right", "MACs": "right"})
    for i, row in enumerate(found.layers):
        size = row.out_size or (1, 1)
        following = found.layers[i + 1].out_size if i + 1 < len(found.layers) else row.out_size
        shown.add_row(
            *(row.layer, str(row.out_channels), f"{size[0]}×{size[1]}"),
            count(row.parameters) if row.parameters else "",
            count(row.macs) if row.macs else "",
            end_section=row.layer.startswith("CONV") or (row.out_size != following) or "Pooling" in row.layer,
        )
    return shown


def _weights(name: str, known: ModelInfo | None) -> list[dict[str, Any]]:
    """The published weights of that name, or those of the network."""
    return weights_of(name if known is None or name in published() else known.name)


def _summary(name: str, model: torch.nn.Module, known: ModelInfo | None, found: Profile) -> Table:
    shown = Table.grid(padding=(0, 2))
    paper = f" (paper: {known.paper_params})" if known and known.paper_params else ""
    if isinstance(model, RecNet):
        numbers = ", ".join(map(str, (model.e, *model.s, *model.d)))
        shown.add_row("notation", f"RecNet({numbers}), {model.head} head")
        shown.add_row("depth, width", f"{model.depth} recurrent steps, {count(model.width)} channels simulated")
    shown.add_row("parameters", f"{count(found.parameters)}{paper}")
    shown.add_row("multiply-adds", f"{count(found.macs)} ({short(found.macs)})")
    if found.crc_macs:
        shown.add_row("in CRC layers", f"{count(found.crc_macs)}; by the paper's formula {count(found.crc_macs_paper)}")
    if found.receptive_field is not None:
        shown.add_row("receptive field", f"{found.receptive_field}×{found.receptive_field} pixels")
    if found.peak_stream != found.peak_concat:
        less = found.peak_concat / found.peak_stream
        memory = f"{short(found.peak_stream)}B streamed, {short(found.peak_concat)}B concatenated ({less:.1f}×)"
    else:
        memory = f"{short(found.peak_concat)}B"
    shown.add_row("tensors alive", f"at most {memory}, one picture, weights not counted")
    weights = _weights(name, known)
    if weights:
        shown.add_row("weights", weights_text(weights))
    if known and known.note:
        shown.add_row("note", known.note)
    return shown
