"""Every command of docs/tables.md is one that the command line understands; the results told are the ledger's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recnets.cli.main import parse
from recnets.experiments.board import duration
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import DATASETS
from recnets.experiments.results import collect
from recnets.experiments.runs import Protocol
from recnets.models import published, read_metadata
from recnets.models.weights import PUBLISHED_FOLDER

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("recnet ")]
INLINE = [text for text in re.findall(r"`(recnet [^`…]*)`", TEXT) if text not in ("recnet reproduce", "recnet tables")]


def test_there_are_commands():
    assert len(LINES) >= 8
    assert len(INLINE) >= 2


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_the_command_is_understood(line):
    assert callable(parse(shlex.split(line, comments=True)[1:]))


@pytest.fixture(scope="module")
def filled():
    """The paper's rows that runs of its length fill, each network once."""
    outcomes = collect(Ledger(ROOT / "results"), Protocol.of(None)).outcomes
    return list({o.entries[0]["name"]: o for o in outcomes if o.entries}.values())


def test_results_of_full_length_are_told(filled):
    """A row of docs/results.md and of the README for each, with the numbers of the ledger."""
    assert filled
    for outcome in filled:
        first = outcome.entries[0]
        cells = [f"{outcome.paper:.2f}", f"{outcome.mean:.2f}", f"{outcome.difference:+.2f}"]
        took = [f"{first['final_top5']:.2f}", str(len(outcome.entries)), duration(first["seconds"]), first["device"]]
        row = [f"[{first['name']}](../results/runs/{first['name']}.json)", *cells, *took]
        assert f"| {' | '.join(row)} |" in RESULTS
        data, epochs = DATASETS[outcome.place.dataset], str(len(first["epochs"]))
        row = [f"[{outcome.row.title}](results/runs/{first['name']}.json)", data, epochs]
        assert f"| {' | '.join([*row, *cells])} |" in README


def test_short_runs_are_told(filled):
    used = {entry["name"] for outcome in filled for entry in outcome.entries}
    for name, entry in Ledger(ROOT / "results").entries().items():
        if name not in used:
            link = f"[{name}](../results/runs/{name}.json)"
            assert f"| {link} | {len(entry['epochs'])} | {entry['final_accuracy']:.2f} |" in RESULTS


@pytest.mark.parametrize("name", published())
def test_published_weights_are_told(name):
    about, size = read_metadata(name), (PUBLISHED_FOLDER / f"{name}.safetensors").stat().st_size
    cells = [f"`{name}`", f"{size:,} bytes", f"{about['accuracy']:.2f} %", f"{about['trained_accuracy']:.2f} %"]
    assert f"| {' | '.join(cells)} | " in RESULTS
    assert re.search(rf"`{name}` \({round(size / 1000):,} KB,\s+{about['accuracy']:.2f} %\)", README)


def test_speed_is_that_of_the_ledger():
    (run,) = [e for n, e in Ledger(ROOT / "results").entries().items() if n == "recnet_60_480-cifar100-s0"]
    last = run["sessions"][-1]
    assert run["images_per_second"] == last["images_per_second"]
    for page in (README, (ROOT / "docs" / "training.md").read_text(encoding="utf-8")):
        assert f"{last['images_per_second']:,.0f}" in page
        assert f"{100 * last['input_share']:.2f} %" in page
    steady = [row["input_share"] for row in run["epochs"] if row["epoch"] > last["first_epoch"]]
    assert max(steady) < 0.03  # the bar for the input pipeline
