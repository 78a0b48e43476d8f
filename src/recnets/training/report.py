"""report.html: a run at a glance, in one file that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from recnets.data import DataSet
from recnets.training.charts import Line, confusion_chart, line_chart, picture_uri
from recnets.training.evaluate import Evaluation
from recnets.training.progress import duration
from recnets.training.recipe import Recipe
from recnets.utils import atomic_write

MISTAKES = 18
PAIRS = 10


def write_report(
    path: Path,
    recipe: Recipe,
    data: DataSet,
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    evaluation: Evaluation,
) -> None:
    """Write the page for the state that `evaluation` (of the test split) describes."""
    data = replace(data, classes=[name.replace("_", " ") for name in data.classes])  # CIFAR's sweet_pepper
    style = (resources.files("recnets") / "training" / "report.css").read_text(encoding="utf-8")
    body = "\n".join(
        [
            _head(recipe, summary),
            _curves(history),
            _confusion(data, evaluation),
            _mistakes(data, evaluation),
            _settings(recipe, summary),
        ]
    )
    title = escape(f"{recipe.model} on {recipe.data}")
    atomic_write(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style>'
        f"<body><main>{body}</main></body></html>\n",
    )


def _head(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    tiles = [
        ("test accuracy", f"{summary['final_accuracy']:.2f}<small> %</small>", "hero"),
        ("top-5", f"{summary['final_top5']:.2f}<small> %</small>", ""),
        ("parameters", _short(summary["parameters"]), ""),
        ("epochs", f"{summary['epochs']}<small> of {recipe.epochs}</small>", ""),
        ("time", duration(summary["seconds"]), ""),
        ("images a second", f"{summary['images_per_second']:,.0f}", ""),
    ]
    cells = "".join(f'<div class="tile {c}"><b>{value}</b><span>{name}</span></div>' for name, value, c in tiles)
    sizes = f"{summary['train_images']:,} training and {summary['test_images']:,} test images"
    lead = f"trained on <b>{escape(recipe.data)}</b>, {sizes}, seed {recipe.seed}, {escape(str(summary['device']))}"
    return f'<header><h1>{escape(recipe.model)}</h1><p>{lead}</p><div class="tiles">{cells}</div></header>'


def _short(count: int) -> str:
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e6:.2f}<small> M</small>" if count >= 1e6 else f"{count / 1e3:.1f}<small> K</small>"


def _column(history: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [row.get(name) for row in history]


def _curves(history: Sequence[Mapping[str, Any]]) -> str:
    epochs = [row["epoch"] for row in history]
    has_val = any("val_accuracy" in row for row in history)

    def lines(kind: str) -> list[Line]:
        found = [Line("train", _column(history, f"train_{kind}"), "train")]
        if has_val:
            found.append(Line("validation", _column(history, f"val_{kind}"), "val"))
        return [*found, Line("test", _column(history, f"test_{kind}"), "test")]

    legend = "".join(f'<span class="key {line.style}">{line.name}</span>' for line in lines("loss"))
    charts = [
        ("Accuracy", legend, line_chart(lines("accuracy"), epochs, unit=" %")),
        ("Loss", legend, line_chart(lines("loss"), epochs, from_zero=True)),
        ("Learning rate", "", line_chart([Line("lr", _column(history, "lr"), "lr")], epochs, from_zero=True)),
    ]
    figures = "".join(f"<figure><figcaption>{t} {k}</figcaption>{c}</figure>" for t, k, c in charts)
    return f'<section class="charts">{figures}</section>'


def _confusion(data: DataSet, evaluation: Evaluation) -> str:
    pairs = "".join(
        f"<tr><td><b>{escape(data.classes[true])}</b> taken for <b>{escape(data.classes[guess])}</b></td>"
        f"<td class=num>{count}</td></tr>"
        for true, guess, count in evaluation.most_confused(PAIRS)
    )
    pairs = f"<table>{pairs}</table>" if pairs else "<p class=muted>No mistake on the test split.</p>"
    ranked = sorted(
        (value, name) for value, name in zip(evaluation.per_class, data.classes, strict=True) if not math.isnan(value)
    )
    hardest = "".join(
        f'<tr><td>{escape(name)}</td><td class="bar"><i style="width:{value:.1f}%"></i></td>'
        f"<td class=num>{value:.1f} %</td></tr>"
        for value, name in ranked[:PAIRS]
    )
    heading = "Classes, the hardest first" if len(ranked) <= PAIRS else f"The {PAIRS} hardest classes"
    return (
        '<section class="two"><figure><figcaption>Confusion matrix '
        '<span class="muted">true class by row, test split</span></figcaption>'
        f"{confusion_chart(evaluation.confusion, data.classes)}</figure><div>"
        f"<h2>Most confused</h2>{pairs}<h2>{heading}</h2><table>{hardest}</table></div></section>"
    )


def _mistakes(data: DataSet, evaluation: Evaluation) -> str:
    wrong = (evaluation.predictions != data.test.labels.cpu()).nonzero().flatten()
    if len(wrong) == 0:
        return ""
    order = wrong[evaluation.confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist()
    cards = []
    for i in order:
        true, guess = data.classes[int(data.test.labels[i])], data.classes[int(evaluation.predictions[i])]
        cards.append(
            f'<div class="card"><img class="pixels" alt="test image {i}" src="{picture_uri(data.test.images[i])}">'
            f"<b>{escape(true)}</b><span>taken for {escape(guess)}, {100 * evaluation.confidence[i]:.0f} % sure</span>"
            "</div>"
        )
    count = f"{len(wrong):,} of {len(data.test):,} test images are wrong"
    shown = f"; the {len(order)} most confident mistakes" if len(wrong) > len(order) else ""
    return (
        f'<section><h2>Mistakes <span class="muted">{count}{shown}</span></h2>'
        f'<div class="cards">{"".join(cards)}</div></section>'
    )


def _settings(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    defaults = Recipe().to_dict()

    def row(name: str, value: Any, changed: bool = False) -> str:
        shown = value if isinstance(value, str) else json.dumps(value)
        mark = ' class="changed"' if changed else ""
        return f"<tr{mark}><td>{escape(name)}</td><td><code>{escape(shown)}</code></td></tr>"

    values = recipe.to_dict()
    changed = "".join(row(name, value, True) for name, value in values.items() if value != defaults[name])
    rest = "".join(row(name, value) for name, value in values.items() if value == defaults[name])
    share = summary.get("input_share")
    origin = {
        "command": summary["command"],
        "commit": summary["commit"] or "not a checkout",
        "device": summary["device"],
        "processes": summary["processes"],
        **summary["versions"],
        "input pipeline": "not measured" if share is None else f"{share:.2%} of a step",
    }
    return (
        '<section class="two even"><div><h2>Recipe <span class="muted">what differs from the defaults</span></h2>'
        f"<table class=settings>{changed}</table><details><summary>the other settings</summary>"
        f"<table class=settings>{rest}</table></details></div><div><h2>Origin</h2>"
        f"<table class=settings>{''.join(row(k, v) for k, v in origin.items())}</table></div></section>"
    )
