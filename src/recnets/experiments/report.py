"""report.html: the tables, the figure and the training curves on one page that needs nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

from recnets.experiments.board import duration
from recnets.experiments.paper import DATASETS, TABLES, Table
from recnets.experiments.points import AXES, FAMILIES, points
from recnets.experiments.results import Outcome, Results, differences
from recnets.experiments.sessions import commits
from recnets.experiments.tables import NOTHING, READING, SPEED, number, other_protocol, ours, shown_datasets
from recnets.models import list_models, model_info
from recnets.training import load_recipe

SHORT = {"parameters": "parameters", "macs": "multiply-adds", "latency": "CPU time"}
PAIRS = ("cifar100", "cifar10")


def write_report(results: Results, latency: Mapping[str, Any] | None) -> str:
    """The page."""
    folder = resources.files("recnets")
    style = "".join((folder / part / "report.css").read_text(encoding="utf-8") for part in ("training", "experiments"))
    script = (folder / "experiments" / "report.js").read_text(encoding="utf-8")
    data = json.dumps(_data(results, latency), ensure_ascii=False).replace("</", "<\\/")
    body = [_head(results), _figure(results, latency), _curves(results)]
    body += [_table(results, TABLES[name]) for name in results.tables]
    body += [_settings(results), _runs(results)]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>RecNets: the paper\'s tables</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style>'
        f"<body><main>{''.join(body)}</main>"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )


def _data(results: Results, latency: Mapping[str, Any] | None) -> dict[str, Any]:
    runs = [
        {
            "title": _run_title(entry) + (f", {len(entry['epochs'])} epochs" if entry in results.others else ""),
            "dataset": entry["dataset"],
            "colour": _colour(entry["model"]),
            "final": entry["final_accuracy"],
            "epochs": [row["epoch"] for row in entry["epochs"]],
            "accuracy": [row["test_accuracy"] for row in entry["epochs"]],
            "loss": [row["train_loss"] for row in entry["epochs"]],
        }
        for entry in _drawn(results)
    ]
    return {
        "axes": [{**asdict(axis), "short": SHORT[axis.name]} for axis in AXES],
        "families": FAMILIES,
        "points": {d: [asdict(p) for p in points(results, latency, d)] for d in PAIRS},
        "runs": runs,
    }


def _drawn(results: Results) -> list[dict[str, Any]]:
    """The runs whose curves are drawn: the tables' own, and others as long as one of those, or with none beside them.

    Beside a curve of 200 epochs one of five is a stroke at the edge, and the other way round.
    """
    lengths = {(e["dataset"], len(e["epochs"])) for e in results.used}
    sets = {dataset for dataset, _ in lengths}
    fitting = [e for e in results.others if e["dataset"] not in sets or (e["dataset"], len(e["epochs"])) in lengths]
    return [*results.used, *fitting]


def _colour(model: str) -> str:
    family = model_info(model).family if model in list_models() else "recnet"
    return FAMILIES[family][1]


def _run_title(entry: Mapping[str, Any]) -> str:
    title = model_info(entry["model"]).title if entry["model"] in list_models() else entry["model"]
    changes = "".join(f", {key} = {value}" for key, value in entry["overrides"].items())
    return f"{title}{changes}, seed {entry['seed']}"


def _head(results: Results) -> str:
    paper = [o for o in results.outcomes if not TABLES[o.place.table].extra]
    filled = [o for o in paper if o.entries]
    gaps = [o.difference for o in filled if o.difference is not None]
    mean = f"{sum(gaps) / len(gaps):+.2f}<small> points</small>" if gaps else NOTHING
    tiles = [
        ("rows filled", f"{len(filled)}<small> of {len(paper)}</small>", "hero"),
        ("runs", f"{len(results.used)}", ""),
        ("mean difference to the paper", mean, ""),
        ("training time", duration(sum(entry["seconds"] for entry in results.used)), ""),
        ("failed", str(sum(1 for o in results.outcomes if o.failure)), ""),
    ]
    cells = "".join(f'<div class="tile {c}"><b>{value}</b><span>{name}</span></div>' for name, value, c in tiles)
    reading = _emphasised(READING)
    other = other_protocol(results)
    reading += f"<br><b>{escape(other)}</b>" if other else ""
    return (
        f'<header><h1>RecNets: the paper\'s tables</h1><p class="lead">{reading}</p><br>'
        f'<div class="tiles">{cells}</div></header>'
    )


def _emphasised(text: str) -> str:
    """Markdown's *words* in HTML."""
    return re.sub(r"\*([\w/]+)\*", r"<b>\1</b>", escape(text))


def _tabs(name: str, label: str, values: Sequence[tuple[str, str]], first: str = "") -> str:
    buttons = "".join(
        f'<button type="button" value="{value}"{" data-first" if value == first else ""}>{escape(text)}</button>'
        for value, text in values
    )
    return f'<div class="tabs" id="{name}" role="group" aria-label="{escape(label)}">{buttons}</div>'


def _figure(results: Results, latency: Mapping[str, Any] | None) -> str:
    axes = [(axis.name, SHORT[axis.name]) for axis in AXES if axis.name != "latency" or latency is not None]
    families = {model_info(o.row.model).family for t in ("2", "3") for o in results.of(t)}
    keys = "".join(f'<span style="--c:{c}">{escape(n)}</span>' for f, (n, c) in FAMILIES.items() if f in families)
    measured = ""
    if latency is not None:
        measured = (
            f'<p class="lead">CPU time: {escape(latency["what"])}, {escape(latency["device"])}, '
            f"{latency['threads']} thread, torch {escape(latency['versions']['torch'])}; "
            f"the least of {min(r['passes'] for r in latency['rows'])} passes or more.</p>"
        )
    return (
        '<section><h2>Accuracy against size</h2><div class="bar-row">'
        f"{_tabs('figure-axis', 'horizontal axis', axes)}"
        f"{_tabs('figure-data', 'data set', [(d, DATASETS[d]) for d in PAIRS])}"
        f'<div class="legend"><span>ours</span><span class="hollow">the paper\'s</span>{keys}</div></div>'
        f'<div class="plot" id="figure"></div>{measured}</section>'
    )


def _curves(results: Results) -> str:
    entries = _drawn(results)
    if not entries:
        return ""
    present = [d for d in (*PAIRS, "digits") if any(e["dataset"] == d for e in entries)]
    return (
        '<section><h2>Training curves</h2><div class="bar-row">'
        f"{_tabs('curves-value', 'what to draw', [('accuracy', 'test accuracy'), ('loss', 'training loss')])}"
        f"{_tabs('curves-data', 'data set', [(d, DATASETS[d]) for d in present])}</div>"
        '<div class="plot" id="curves"></div></section>'
    )


def _cell(shown: str, value: float | str | None = None, kind: str = "n") -> str:
    """`value` is what sorting goes by."""
    return f'<td class="{kind}" data-v="{"" if value is None else escape(str(value))}">{shown}</td>'


def html_table(
    header: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], groups: Sequence[tuple[str, int]] = ()
) -> str:
    """A sortable table of (title, class) columns and ready cells; `groups` are (title, columns) above them."""
    above = "".join(
        f'<th colspan="{span}"{" class=group" if title else ""}>{escape(title)}</th>' for title, span in groups
    )
    above = f"<tr>{above}</tr>" if groups else ""
    head = "".join(f'<th class="{kind}" scope="col">{escape(title)}</th>' for title, kind in header)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    table = f'<table class="data"><thead>{above}<tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _result_cells(outcome: Outcome) -> list[str]:
    gap = outcome.difference
    way = "" if gap is None else "up" if gap >= 0 else "down"
    shown = f"<b>{escape(ours(outcome))}</b>"
    if outcome.failure:
        shown = f'<span class="bad" title="{escape(outcome.failure)}">failed</span>'
    elif outcome.entries:
        names = ", ".join(e["name"] for e in outcome.entries)
        shown = f'<span title="{escape(names)}">{shown}</span>'
    return [
        _cell(number(outcome.paper), outcome.paper),
        _cell(shown, outcome.mean),
        _cell(f'<span class="{way}">{number(gap, "{:+.2f}")}</span>', gap),
        _cell(str(len(outcome.entries) or NOTHING), len(outcome.entries)),
    ]


def _table(results: Results, table: Table) -> str:
    by_set = {d: results.of(table.name, d) for d in shown_datasets(results, table)}
    header = [(title, "") for title in table.header]
    header += [("paper", "n"), ("linear", "n"), ("hidden", "n"), ("mult-adds", "n")]
    groups = [("", len(table.header)), ("parameters", 3), ("", 1)]
    for dataset in by_set:
        header += [("paper", "n"), ("ours", "n"), ("diff", "n"), ("seeds", "n")]
        groups.append((DATASETS[dataset], 4))
    rows = []
    for i, row in enumerate(table.rows):
        last = next(reversed(by_set.values()))[i]
        linear, hidden = last.linear_parameters(), last.hidden_parameters()
        cells = [_cell(escape(cell), cell, "") for cell in row.cells]
        cells += [
            _cell(row.parameters or NOTHING, linear if row.parameters else None),
            _cell(f"{linear:,}", linear),
            _cell(number(hidden, "{:,}"), hidden),
            _cell(f"{last.cost.macs / 1e6:,.0f} M", last.cost.macs),
        ]
        for outcomes in by_set.values():
            cells += _result_cells(outcomes[i])
        rows.append(cells)
    failed = [
        f'<li><span class="bad">failed</span> {escape(f"{o.row.title}, {DATASETS[dataset]}: {o.failure}")}</li>'
        for dataset, outcomes in by_set.items()
        for o in outcomes
        if o.failure
    ]
    notes = [f"<li>{escape(row.cells[0])}: {escape(row.note)}</li>" for row in table.rows if row.note]
    below = f"<ul>{''.join(failed)}</ul>" if failed else ""
    if notes:
        below += f"<details><summary>Notes on the sizes</summary><ul>{''.join(notes)}</ul></details>"
    return f"<section><h2>{escape(table.title)}</h2>{html_table(header, rows, groups)}{below}</section>"


def _settings(results: Results) -> str:
    if not results.used:
        return ""
    changes = differences(results.used, load_recipe("paper").to_dict())
    items = "".join(
        f"<li><code>{escape(change)}</code>: {len(names)} of {len(results.used)} runs</li>"
        for change, names in changes.items()
    )
    text = f"<ul>{items}</ul>" if items else '<p class="lead">Nothing: every run follows the paper\'s recipe.</p>'
    return f"<section><h2>What differs from the paper's settings</h2>{text}</section>"


def _runs(results: Results) -> str:
    entries = [*results.used, *results.others]
    if not entries:
        return ""
    header = [("run", ""), ("accuracy", "n"), ("top-5", "n"), ("epochs", "n"), ("time", "n"), ("images/s", "n"),
              ("parameters", "n"), ("precision", ""), ("device", ""), ("finished", ""), ("commit", "")]  # fmt: skip
    rows = [
        [
            _cell(f'<span title="{escape(e["command"])}">{escape(e["name"])}</span>', e["name"], ""),
            _cell(f"{e['final_accuracy']:.2f}", e["final_accuracy"]),
            _cell(f"{e['final_top5']:.2f}", e["final_top5"]),
            _cell(str(len(e["epochs"])), len(e["epochs"])),
            _cell(duration(e["seconds"]), e["seconds"]),
            _cell(f"{e['images_per_second']:,.0f}", e["images_per_second"]),
            _cell(f"{e['parameters']:,}", e["parameters"]),
            _cell(e["recipe"]["precision"], e["recipe"]["precision"], ""),
            _cell(escape(e["device"]), e["device"], ""),
            _cell(escape(e["finished"][:10]), e["finished"], ""),
            _cell(escape(commits(e["sessions"])).replace(", ", "<br>"), e["commit"], ""),
        ]
        for e in entries
    ]
    made = time.strftime("%Y-%m-%d")
    return (
        f"<section><h2>The runs</h2>{html_table(header, rows)}"
        f'<p class="lead">{_emphasised(SPEED)}<br>'
        f"Made by <code>recnet tables</code> on {made}; hover a run for its command.</p></section>"
    )
