"""`recnet squeeze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from recnets.cli import output
from recnets.data import data_of
from recnets.deploy.check import Comparison, compare
from recnets.deploy.live import foldable
from recnets.deploy.onnx import graph_of
from recnets.deploy.squeeze import THRESHOLD, Row, describe, squeeze
from recnets.errors import RecNetsError
from recnets.models import RecNet, load_weights, save_weights
from recnets.models.profile import count_macs
from recnets.models.squeezed import recurrent_modules
from recnets.utils import at_least, check_target


def command(
    source: Annotated[str, tyro.conf.Positional],
    /,
    *,
    out: Path,
    threshold: float = THRESHOLD,
    images: int = 2000,
    max_changed: float = 0.5,
    half: bool = False,
    data: str | None = None,
    data_dir: Path | None = None,
    max_bad: float | None = None,
) -> int:
    """Take out of trained weights, without loss, what training left dead, and check the predictions.

    Args:
        source: a run folder, a weights file or a published name.
        out: the weights file to write.
        threshold: BN weights up to this magnitude count as zero.
        images: test pictures to compare predictions on.
        max_changed: percent of predictions that may change; above it nothing is written.
        half: store the weights in fp16, as published ones are, and compare those.
        data: the data set of those pictures; by default what the weights were trained on.
        data_dir: folder with the data sets; RECNETS_DATA, else a cache folder.
        max_bad: the largest share of unreadable pictures in a folder; by default as in training.
    """
    if images < 1:
        raise ValueError(f"images must be at least 1, got {images}")
    at_least(max_changed, 0, "max_changed")
    check_target(out)
    model, metadata = load_weights(source)
    small = squeeze(model, threshold)
    if half:
        small = small.half().float()  # what the file will hold
    assert isinstance(model, RecNet)
    test = data_of(metadata, data, data_dir, max_bad).test
    comparison = compare(model, small, test, metadata, images)
    console = output.console()
    console.print(_table(describe(model, small)))
    console.out(str(comparison))
    if 100 * comparison.changed > max_changed * comparison.images:
        raise RecNetsError(
            f"{comparison.changed} of {comparison.images} predictions changed, more than {max_changed} %: nothing is "
            f"written; a --threshold below {threshold} takes out less"
        )
    kept = _metadata(metadata, comparison, len(test), threshold)
    save_weights(out, small, kept, dtype=torch.float16 if half else None)
    console.out(f"wrote {out} ({out.stat().st_size:,} bytes)")
    if all(foldable(module) for module in recurrent_modules(model).values()):
        height, width = test.images.shape[2:]
        before, after = (count_macs(m, (height, width)) for m in (model, graph_of(small, "concat")))
        console.out(f"a file of it takes {after / 1e6:,.1f} million multiply-adds a picture, of {before / 1e6:,.1f}")
    return 0


def _metadata(metadata: dict[str, Any], comparison: Comparison, test_images: int, threshold: float) -> dict[str, Any]:
    """The source's metadata; its accuracy is replaced only by one on the whole test set, else left out."""
    kept = {key: value for key, value in metadata.items() if key not in ("format", "model", "parameters", "accuracy")}
    kept["squeezed"] = {"threshold": threshold, "parameters_before": metadata.get("parameters")}
    if comparison.images == test_images:
        kept["accuracy"] = comparison.accuracy_after
    return kept


def _table(rows: list[Row]) -> Table:
    table = Table("layer", "step channels", "outputs", "s_in", "s_out", "parameters", "gone")
    for column in table.columns[1:]:
        column.justify = "right"

    def change(pair: tuple[int, int]) -> str:
        return "" if pair == (0, 0) else f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,} -> {pair[1]:,}"

    def gone(pair: tuple[int, int]) -> str:
        return f"{100 * (pair[0] - pair[1]) / max(1, pair[0]):.1f} %"

    for row in rows:
        pairs = (row.steps, row.outputs, row.s_in, row.s_out, row.parameters)
        table.add_row(row.name, *(change(pair) for pair in pairs), gone(row.parameters))
    table.add_section()
    whole = (sum(row.parameters[0] for row in rows), sum(row.parameters[1] for row in rows))
    steps = (sum(row.steps[0] for row in rows), sum(row.steps[1] for row in rows))
    table.add_row("all", change(steps), "", "", "", change(whole), gone(whole))
    return table
