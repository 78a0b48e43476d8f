"""TABLES.md: each table in the paper's order, the paper's numbers, ours, and what they were made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recnets.experiments.board import duration
from recnets.experiments.paper import DATASETS, TABLES, Table
from recnets.experiments.results import Outcome, Results, differences
from recnets.experiments.sessions import commits
from recnets.training import load_recipe

NOTHING = "–"

READING = """\
Accuracy is that of the last epoch on the test set, in percent; the test set chooses nothing. *ours* is the mean over
seeds where there are several, with their standard deviation; *diff* is ours less the paper's, in points. Parameters
are for 100 classes: as the paper prints them, with the classifier of its architecture table (*linear*, which is what
is trained here unless a row says otherwise), and with the one hidden layer of 160 units that its counts imply
(*hidden*)."""

AVERAGED = """\
*averaged* is the accuracy with BN's statistics averaged over 100 batches of training images: training leaves mostly
those of the last few. No table above has it. """
SPEED = """\
*time* is that of all sessions, warm-up and evaluations included. *images/s* is the median epoch of the session that
trained the most epochs, its first, with compilation and warm-up, left out. Where a run was resumed with another
*commit*, the epochs that each trained stand beside it; every session and epoch is in the run's file."""


def write_tables(results: Results) -> str:
    """The text of TABLES.md."""
    parts = ["# The paper's tables", READING, _overview(results)]
    parts += [_table(results, TABLES[name]) for name in results.tables]
    parts += [_settings(results), _runs(results), _others(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _overview(results: Results) -> str:
    paper = [o for o in results.outcomes if not TABLES[o.place.table].extra]
    filled = [o for o in paper if o.entries]
    failed = [o for o in results.outcomes if o.failure]
    runs = "1 run" if len(results.used) == 1 else f"{len(results.used)} runs"
    text = f"{len(filled)} of {len(paper)} rows (each table on each data set) are filled, by {runs}"
    text += f"; {len(failed)} failed." if failed else "."
    return "\n\n".join(part for part in (other_protocol(results), text) if part)


def other_protocol(results: Results) -> str:
    """A sentence where the rows are filled by runs that are not meant to reach the paper's numbers."""
    label = results.protocol.label
    return f"The rows are filled by runs with other settings than the paper's: {label}." if label else ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; all but the first `left` columns are numbers."""
    line = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, line, *rows])


def ours(outcome: Outcome, runs: str | None = None) -> str:
    """ "77.79", "77.79 ± 0.12", "failed" or a dash; with the folder `runs`, linked to the first seed's file."""
    if outcome.mean is None:
        return "failed" if outcome.failure else NOTHING
    text = f"{outcome.mean:.2f}" + (f" ± {outcome.spread:.2f}" if outcome.spread is not None else "")
    return text if runs is None else f"[{text}]({runs}/{outcome.entries[0]['name']}.json)"


def number(value: float | None, pattern: str = "{:.2f}") -> str:
    return NOTHING if value is None else pattern.format(value)


def shown_datasets(results: Results, table: Table) -> list[str]:
    """Those that the paper has numbers for, or we do; the table's own where nobody has any."""
    known = [d for d in table.datasets if any(o.paper or o.entries or o.failure for o in results.of(table.name, d))]
    return known or list(table.datasets)


def _table(results: Results, table: Table) -> str:
    by_set = {d: results.of(table.name, d) for d in shown_datasets(results, table)}
    header = [*table.header, "params, paper", "linear", "hidden"]
    for dataset in by_set:
        header += [f"{DATASETS[dataset]}, paper", "ours", "diff", "seeds"]
    rows = []
    for i, row in enumerate(table.rows):
        last = next(reversed(by_set.values()))[i]
        hidden = last.hidden_parameters()
        cells = [*row.cells, row.parameters or NOTHING, f"{last.linear_parameters():,}", number(hidden, "{:,}")]
        for outcome in (outcomes[i] for outcomes in by_set.values()):
            cells += [
                number(outcome.paper),
                ours(outcome, results.runs),
                number(outcome.difference, "{:+.2f}"),
                str(len(outcome.entries)) if outcome.entries else NOTHING,
            ]
        rows.append(cells)
    parts = [f"## {table.title}", markdown(header, rows, len(table.header))]
    notes = [f"- {row.cells[0]}: {row.note}" for row in table.rows if row.note]
    failed = [
        f"- failed: {o.row.title} on {DATASETS[o.place.dataset]}: {o.failure}"
        for outcomes in by_set.values()
        for o in outcomes
        if o.failure
    ]
    return "\n\n".join([*parts, *(["\n".join([*failed, *notes])] if failed or notes else [])])


def _settings(results: Results) -> str:
    """What differs from the paper's recipe in the runs above."""
    changes = differences(results.used, load_recipe("paper").to_dict())
    lines = ["## What differs in settings", ""]
    if not results.used:
        return ""
    if not changes:
        lines.append("Nothing: every run above follows the paper's recipe.")
    for change, names in changes.items():
        who = "every run" if len(names) == len(results.used) else f"{len(names)} runs ({', '.join(names[:3])}…)"
        if len(names) <= 3 and len(names) != len(results.used):
            who = ", ".join(names)
        lines.append(f"- `{change}`: {who}")
    return "\n".join(lines)


def _runs(results: Results) -> str:
    if not results.used:
        return ""
    header = ["Run", "accuracy", "top-5", "epochs", "time", "images/s", "mult-adds", "device", "commit"]
    rows = [_run_cells(entry, results.runs) for entry in results.used]
    averaged = [entry.get("averaged_accuracy") for entry in results.used]
    if any(value is not None for value in averaged):
        header.insert(2, "averaged")
        for row, value in zip(rows, averaged, strict=True):
            row.insert(2, number(value))
    note = AVERAGED if "averaged" in header else ""
    return f"## The runs\n\n{markdown(header, rows)}\n\n{note}{SPEED}"


def _run_cells(entry: dict[str, Any], runs: str) -> list[str]:
    return [
        f"[{entry['name']}]({runs}/{entry['name']}.json)",
        f"{entry['final_accuracy']:.2f}",
        f"{entry['final_top5']:.2f}",
        str(len(entry["epochs"])),
        duration(entry["seconds"]),
        f"{entry['images_per_second']:,.0f}",
        f"{entry['macs'] / 1e6:,.1f} M",
        entry["device"],
        commits(entry["sessions"]),
    ]


def _others(results: Results) -> str:
    """Runs of the ledger by other settings than the tables'."""
    if not results.others:
        return ""
    base = load_recipe("paper").to_dict()
    rows = [
        [*_run_cells(entry, results.runs)[:2], "; ".join(f"`{c}`" for c in differences([entry], base)) or NOTHING]
        for entry in results.others
    ]
    return "## Runs by other settings\n\n" + markdown(["Run", "accuracy", "settings that differ"], rows)
