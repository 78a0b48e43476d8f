"""`recnet eval`."""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recnets.cli import output
from recnets.data import DataSet, data_of, normalisation_of, spec_of
from recnets.errors import RecNetsError
from recnets.models import load_weights
from recnets.training import Evaluation, Evaluator
from recnets.training.distributed import Processes, choose_device
from recnets.training.precision import Precision


def command(
    weights: Annotated[str, tyro.conf.Positional],
    /,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    split: Literal["test", "train"] = "test",
    batch: int = 1000,
    device: str = "auto",
    precision: Precision = "fp32",
    max_bad: float | None = None,
    no_per_class: bool = False,
    json: bool = False,
) -> int:
    """Accuracy of trained weights: top-1, top-5, loss, and a table by class.

    Args:
        weights: a run folder, a weights file or a published name.
        data: digits, cifar10, cifar100 or folder:PATH; by default what the weights were trained on.
        data_dir: folder with the data sets; RECNETS_DATA, else a cache folder.
        split: which images.
        batch: images a batch.
        device: cpu, cuda, cuda:1, mps; auto takes a GPU if there is one.
        precision: fp32, tf32, or autocast in bf16 or fp16 (fp16 is for GPUs: slow on a CPU).
        max_bad: the largest share of unreadable pictures in a folder; by default as in training.
        no_per_class: leave the table by class out.
        json: print JSON, for programs.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    model, metadata = load_weights(weights)
    where = choose_device(device, Processes())
    spec = spec_of(metadata, data)
    found = data_of(metadata, data, data_dir, max_bad)
    if model.num_classes != found.num_classes:
        raise RecNetsError(
            f"{weights} has {model.num_classes} classes, {spec} has {found.num_classes}: give other --data"
        )
    mean, std = normalisation_of(metadata, found)
    chosen = found.test if split == "test" else found.train
    evaluator = Evaluator(
        chosen, found.num_classes, mean=mean, std=std, device=where, batch_size=batch, precision=precision
    )
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(f"{len(chosen):,} images", total=len(chosen))
        evaluation = evaluator(model.to(where), lambda images: progress.advance(task, images))
    if json:
        print(json_module.dumps(_plain(weights, spec, split, found, evaluation), indent=2))
    else:
        _show(output.console(), weights, spec, split, found, evaluation, not no_per_class)
    return 0


def _plain(weights: str, spec: str, split: str, data: DataSet, evaluation: Evaluation) -> dict[str, Any]:
    by_class = zip(data.classes, evaluation.per_class, strict=True)
    return {
        "weights": weights,
        "data": spec,
        "split": split,
        "images": len(evaluation.predictions),
        "accuracy": evaluation.accuracy,
        "top5": evaluation.top5,
        "loss": evaluation.loss,
        "per_class": {name: None if math.isnan(value) else value for name, value in by_class},
    }


def _show(
    console: Console, weights: str, spec: str, split: str, data: DataSet, evaluation: Evaluation, per_class: bool
) -> None:
    count = len(evaluation.predictions)
    console.print(f"{weights} on {spec}, {count:,} {split} images", highlight=False)
    console.print(
        f"top-1 {evaluation.accuracy:.2f} %   top-5 {evaluation.top5:.2f} %   loss {evaluation.loss:.4f}",
        style="bold green",
        highlight=False,
    )
    if not per_class:
        return
    table = Table("class", "images", "right", "accuracy", "mostly taken for")
    for column in table.columns[1:4]:
        column.justify = "right"
    wrong = evaluation.confusion.clone()
    wrong.fill_diagonal_(0)
    for i, name in enumerate(data.classes):
        total, right = int(evaluation.confusion[i].sum()), int(evaluation.confusion[i, i])
        most = int(wrong[i].argmax())
        mistaken = f"{data.classes[most]} ({int(wrong[i, most])})" if int(wrong[i, most]) else ""
        share = f"{100 * right / total:.1f} %" if total else ""
        table.add_row(name, str(total), str(right), share, mistaken)
    console.print(table)
