"""TABLES.md, the figures and the page from a made-up ledger."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from pathlib import Path

import pytest

from recnets.cli.main import main
from recnets.errors import RecNetsError
from recnets.experiments import latency
from recnets.experiments.figure import draw_figure
from recnets.experiments.ledger import Ledger
from recnets.experiments.points import AXES, points, printed_millions
from recnets.experiments.results import collect
from recnets.experiments.runs import Protocol, places
from recnets.experiments.tables import write_tables

PAPER = Protocol.of(None)
BF16 = Protocol.of(None, {"precision": "bf16"})


@pytest.fixture
def ledger(tmp_path, make_entry):
    """RecNet-60-1280 with three seeds in bf16, MobileNet once, WRN-40-1 failed, and a run by other settings."""
    found = {p.row.title: p for p in places(["2", "3"], ["cifar100"], 3, BF16)}
    ledger = Ledger(tmp_path / "results")
    for run, accuracy in zip(found["RecNet-60-1280"].runs, (77.0, 78.0, 79.0), strict=True):
        ledger.add(make_entry(run, accuracy))
    ledger.add(make_entry(found["MobileNet"].runs[0], 72.5))
    ledger.add_failure(found["WRN-40-1"].runs[0], "out of <memory>", "recnet reproduce")
    other = Protocol.of(None, {"decay": "weights"}).run("2", found["RecNet-60-480"].row, "cifar100", 0)
    ledger.add(make_entry(other, 71.0))
    return ledger


def test_rows_are_filled_by_their_own_runs_only(ledger):
    results = collect(ledger, PAPER)
    by_title = {(o.place.table, o.row.title): o for o in results.outcomes if o.place.dataset == "cifar100"}
    outcome = by_title["2", "RecNet-60-1280"]
    assert outcome.accuracies == [77.0, 78.0, 79.0]
    assert (outcome.mean, outcome.spread, outcome.difference) == (78.0, 1.0, pytest.approx(-0.25))
    assert by_title["1b", "RecNet-60-1280"].mean == 78.0  # the same run in another table
    assert by_title["1b", "RecNet-60-1280, e = 2"].mean is None
    assert by_title["3", "WRN-40-1"].failure == "out of <memory>"
    assert [e["name"] for e in results.others] == ["recnet_60_480-cifar100-decay_weights-s0"]
    assert len(results.used) == 4
    assert set(results.tables) == {"1a", "1b", "1c", "1d", "2", "3"}


def test_accuracies_with_averaged_statistics_stand_beside_the_others_where_there_are_any(ledger, make_entry):
    assert "averaged" not in write_tables(collect(ledger, PAPER))
    run = next(p for p in places(["2"], ["cifar100"], 1, BF16) if p.row.title == "RecNet-60-640").runs[0]
    ledger.add({**make_entry(run, 74.0), "averaged_accuracy": 74.36})
    text = write_tables(collect(ledger, PAPER))
    rows = [line for line in text.partition("## The runs")[2].splitlines() if line.startswith("| [")]
    assert "| 74.00 | 74.36 | 99.00 |" in next(row for row in rows if "recnet_60_640" in row)
    assert "| 72.50 | – | 99.00 |" in next(row for row in rows if "mobilenet" in row)
    assert "averaged over 100 batches" in text


def test_the_text(ledger):
    assert main(["tables", "--results", str(ledger.folder), "--no-figures"]) == 0
    text = (ledger.folder / "TABLES.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| RecNet(4, 8, 16, 32, 10, 10, 10)"))
    assert "| 1,769K | 1,733,140 | 1,768,900 | 95.15 | – | – | – | 78.25 | [78.00 ± 1.00]" in row
    assert row.endswith("| -0.25 | 3 |")
    assert "| MobileNet | 3.3M | 3,309,476 | – | 73.65 | [72.50](runs/mobilenet-cifar100-s0.json) | -1.15 | 1 |" in text
    assert "- failed: WRN-40-1 on CIFAR-100: out of <memory>" in text
    assert "- `precision: 'fp32' -> 'bf16'`: every run" in text
    assert "`decay: 'all' -> 'weights'`" in text.partition("## Runs by other settings")[2]
    tables = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [name.split(":")[0] for name in tables[:6]] == [f"Table {t}" for t in ("1a", "1b", "1c", "1d", "2", "3")]
    widths = {line.count("|") for line in text.partition("## Table 2")[2].partition("\n## ")[0].splitlines() if line}
    assert len(widths - {0}) == 1  # every line of a table has the same number of cells


def test_short_runs_fill_rows_only_when_asked_for_and_elsewhere(ledger, make_entry, tmp_path):
    short = Protocol.of(None, {"epochs": 5, "restarts": [], "precision": "bf16"})
    row = next(p.row for p in places(["2"], ["cifar100"], 1, short) if p.row.title == "RecNet-60-480")
    entry = make_entry(short.run("2", row, "cifar100", 0), 54.5)
    first, second = ({**entry["sessions"][0], "commit": c * 40 + "+"} for c in "ab")
    ledger.add({**entry, "sessions": [{**first, "last_epoch": 2}, {**second, "first_epoch": 3}]})
    name = "recnet_60_480-cifar100-epochs_5-restarts_-s0"

    assert main(["tables", "--results", str(ledger.folder), "--no-figures"]) == 0
    text = (ledger.folder / "TABLES.md").read_text()
    assert "other settings than the paper's:" not in text
    assert f"[{name}](runs/{name}.json) | 54.50" in text.partition("## Runs by other settings")[2]
    assert "54.5" not in text.partition("## Runs by other settings")[0]
    page = (ledger.folder / "report.html").read_text()
    assert name in page
    assert "RecNet-60-480, seed 0, 200 epochs" in page  # by other settings, but as long as the tables' runs
    assert "RecNet-60-480, seed 0, 5 epochs" not in page  # no curve beside those of 200 epochs

    out = tmp_path / "elsewhere" / "short"
    command = ["tables", "--results", str(ledger.folder), "--out", str(out), "--no-figures"]
    assert main([*command, "--set", "epochs=5", "restarts=[]"]) == 0
    text = (out / "TABLES.md").read_text()
    assert "other settings than the paper's: epochs = 5, restarts = []." in text
    link = re.search(r"\[54\.50\]\((.*?)\) \| -19\.18", text)[1]
    assert (out / link).resolve() == ledger.runs / f"{name}.json"
    assert "| aaaaaaaaa+ (1–2), bbbbbbbbb+ (3–5) |" in text
    page = (out / "report.html").read_text()
    assert "epochs = 5, restarts = []" in page
    assert '"title": "RecNet-60-480, seed 0"' in page
    assert "RecNet-60-1280, seed 0" not in page


def test_curves_of_short_runs_where_there_are_no_others(tmp_path, make_entry):
    short = Protocol.of(None, {"epochs": 5, "restarts": []})
    row = next(p.row for p in places(["2"], ["cifar100"], 1, short) if p.row.title == "RecNet-60-480")
    Ledger(tmp_path).add(make_entry(short.run("2", row, "cifar100", 0), 54.5))
    assert main(["tables", "--results", str(tmp_path), "--no-figures"]) == 0
    assert "RecNet-60-480, seed 0, 5 epochs" in (tmp_path / "report.html").read_text()


def test_an_empty_ledger_still_shows_the_paper(tmp_path):
    assert main(["tables", "--results", str(tmp_path), "--no-figures"]) == 0
    assert "0 of 80 rows" in (tmp_path / "TABLES.md").read_text()


def test_a_ledger_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["tables", "--results", str(tmp_path / "typo")]) == 1
    assert f"no folder {tmp_path / 'typo'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_figures_are_left_out(ledger, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["tables", "--results", str(ledger.folder)]) == 0
    captured = capsys.readouterr()
    assert "the figures are left out" in captured.err
    assert "recnets[plots]" in captured.err
    assert captured.out.split() == [str(ledger.folder / name) for name in ("TABLES.md", "report.html")]


class Page(html.parser.HTMLParser):
    """Collects what a page refers to, and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values[key] for key in ("src", "href") if values.get(key)]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append(values["data-v"])
        if tag not in ("meta", "br", "html", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "html":
            assert self.open.pop() == tag


def test_the_page(ledger):
    latency_record = {
        "format": 1, "what": "one picture", "device": "a cpu", "threads": 1, "versions": {"torch": "2"},
        "rows": [{"network": "MobileNet", "least_ms": 4.5, "median_ms": 5.0, "passes": 10}],
    }  # fmt: skip
    (ledger.folder / "latency.json").write_text(json.dumps(latency_record))
    assert main(["tables", "--results", str(ledger.folder), "--no-figures"]) == 0
    text = (ledger.folder / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []  # nothing from elsewhere
    assert "<memory>" not in text
    assert "out of &lt;memory&gt;" in text
    sorted_by = next(row for row in page.rows if row and row[0] == "MobileNet")
    assert sorted_by[5:] == ["73.65", "72.5", str(72.5 - 73.65), "1"]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert {run["title"] for run in data["runs"]} >= {"RecNet-60-1280, seed 2", "MobileNet, seed 0"}
    mobile = next(p for p in data["points"]["cifar100"] if p["title"] == "MobileNet")
    assert (mobile["ours"], mobile["paper"], mobile["x"]["latency"]) == (72.5, 73.65, 4.5)
    assert len(data["points"]["cifar100"]) == 12 + 15


def test_figures(ledger, tmp_path):
    pytest.importorskip("matplotlib")
    found = points(collect(ledger, PAPER), None, "cifar100")
    written = draw_figure(found, AXES[0], tmp_path / "figure", "A title")
    assert [path.name for path in written] == ["figure.svg", "figure.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    first = written[0].read_bytes()
    draw_figure(found, AXES[0], tmp_path / "figure", "A title")
    assert written[0].read_bytes() == first  # no date, no random names: a change is a change of results
    assert draw_figure(found, AXES[2], tmp_path / "latency", "A title") == []  # nothing was timed


def test_printed_counts():
    assert [printed_millions(t) for t in ("471K", "1,769K", "6.8M")] == [0.471, 1.769, 6.8]
    with pytest.raises(ValueError, match="'many'"):
        printed_millions("many")


def test_latency_is_measured_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "_networks", lambda: {"Small": ("RecNet(1, 2, 2, 2, 2)", {})})
    monkeypatch.setattr(latency, "SECONDS", 0.05)
    path = tmp_path / "deep" / "latency.json"
    record = latency.measure(path, "recnet tables --latency", say=lambda line: None)
    assert latency.read(path) == record
    row = record["rows"][0]
    assert 0 < row["least_ms"] <= row["median_ms"]
    assert row["passes"] >= latency.LEAST
    assert record["device"]
    assert latency.by_network(record) == {"Small": row["least_ms"]}
    assert latency.read(tmp_path / "none.json") is None
    path.write_text("{}")
    with pytest.raises(RecNetsError, match="not a file of latencies"):
        latency.read(path)


@pytest.mark.parametrize(
    ("folder", "runs", "settings"), [("", "runs", {}), ("short", "../runs", {"epochs": 5, "restarts": []})]
)
def test_the_tables_of_the_repository_are_those_of_its_ledger(folder, runs, settings):
    """A new run wants `recnet tables` anew, for the short runs too (docs/tables.md)."""
    results = Path(__file__).parents[2] / "results"
    expected = write_tables(collect(Ledger(results), Protocol.of(None, settings), runs))
    assert (results / folder / "TABLES.md").read_text(encoding="utf-8") == expected
