"""`recnet info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch import nn

from recnets.cli.list_ import weights_of, weights_row, weights_text
from recnets.cli.named import names_weights
from recnets.cli.output import console, count, print_json, short, table
from recnets.models import ModelInfo, Profile, RecNet, create_model, load_weights, model_info, profile
from recnets.models.registry import canonical_name
from recnets.models.weights import image_size_of


def record(name: str) -> ModelInfo | None:
    """The registered record; None for the paper's notation."""
    try:
        return model_info(canonical_name(name))
    except ValueError:
        return None


def build(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the metadata if NAME means trained weights."""
    given = {key: value for key, value in options.items() if value is not None}
    if not names_weights(name):
        with torch.device("meta"):  # nothing is computed, so nothing need be stored
            return create_model(name, **{"num_classes": 100, **given}), {}
    if given:
        named = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        raise ValueError(f"{name} holds trained weights, whose network is what it is: leave out {named}")
    return load_weights(name)


def command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    /,
    *,
    head: Literal["linear", "hidden"] | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
    json: bool = False,
) -> None:
    """One model layer by layer: output, parameters and multiply-adds, then the whole: memory and receptive field.

    Args:
        name: a network or published weights that `recnet list` shows, 'RecNet(4, 8, 16, 32, 10, 10, 10)', a weights
            file or a run folder.
        head: classifier of a RecNet: linear is the paper's table (default), hidden what its parameter counts imply.
        image_size: side of the picture in pixels; what weights were trained on, else 32.
        num_classes: outputs of the classifier, by default 100; weights have their own.
        in_channels: channels of the picture, by default 3; weights have their own.
        json: print JSON, for programs.
    """
    model, about = build(name, {"head": head, "num_classes": num_classes, "in_channels": in_channels})
    found = profile(model, image_size_of(about) if image_size is None else image_size)
    network = about["model"]["name"] if about else name
    known = record(network)
    weights = [weights_row(name, about)] if about else weights_of(known.name if known else name)
    if json:
        print_json(_as_json(network, model, known, weights, found))
        return
    out = console()
    out.print(_layers(known.title if known else network, found))
    out.print(_summary(model, known, weights, about.get("squeezed"), found))


def _as_json(
    name: str, model: nn.Module, known: ModelInfo | None, weights: list[dict[str, Any]], found: Profile
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": known.name if known else name,
        "title": known.title if known else name,
        "paper_parameters": known.paper_params if known else None,
        "note": known.note if known else "",
        "weights": weights,
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


def _summary(
    model: nn.Module,
    known: ModelInfo | None,
    weights: list[dict[str, Any]],
    squeezed: dict[str, Any] | None,
    found: Profile,
) -> Table:
    shown = Table.grid(padding=(0, 2))
    paper = f" (paper: {known.paper_params})" if known and known.paper_params else ""
    if isinstance(model, RecNet):
        numbers = ", ".join(map(str, (model.e, *model.s, *model.d)))
        shown.add_row("notation", f"RecNet({numbers}), {model.head} head")
        shown.add_row("depth, width", f"{model.depth} recurrent steps, {count(model.width)} channels simulated")
    shown.add_row("parameters", f"{count(found.parameters)}{paper}")
    if squeezed and squeezed.get("parameters_before"):
        shown.add_row("squeezed", f"from {count(squeezed['parameters_before'])} parameters")
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
    if weights:
        shown.add_row("weights", weights_text(weights))
    if known and known.note:
        shown.add_row("note", known.note)
    return shown
