"""The ledger: what is in it is checked, whole, and right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recnets.errors import RecNetsError
from recnets.experiments.cost import cost
from recnets.experiments.ledger import Ledger, check_entry, entry_from_folder
from recnets.experiments.paper import TABLES
from recnets.experiments.runs import Protocol

RESULTS = Path(__file__).parents[2] / "results"


def demo_run(**settings):
    return Protocol.of(None, {"epochs": 3, **settings}).run("demo", TABLES["demo"].rows[0], "digits", 0)


def test_the_repositorys_own_ledger():
    """Every file satisfies the schema (entries() raises otherwise) and its sizes are recomputed right."""
    ledger = Ledger(RESULTS)
    for name, entry in ledger.entries().items():
        size = cost(entry["model"], entry["overrides"], entry["dataset"])
        assert (name, entry["parameters"], entry["macs"]) == (name, size.parameters, size.macs)
    ledger.failed()


def test_round_trip(tmp_path, make_entry):
    ledger, run = Ledger(tmp_path), demo_run()
    assert not ledger.done(run)
    entry = make_entry(run, 77.5)
    path = ledger.add(entry)
    assert json.loads(path.read_text()) == entry == ledger.entries()[run.name]
    assert ledger.done(run)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_precision_does_not_make_another_run_but_the_recipe_does(tmp_path, make_entry):
    ledger = Ledger(tmp_path)
    ledger.add(make_entry(demo_run(precision="bf16"), 77.5))
    assert ledger.done(demo_run())
    entry = make_entry(demo_run(), 50.0)
    entry["recipe"] = {**entry["recipe"], "lr": 0.7}
    ledger.add(entry)
    with pytest.raises(RecNetsError, match=r"other settings \(lr: 0.7 -> 0.05\)"):
        ledger.done(demo_run())


def test_a_failure_is_kept_until_the_run_succeeds(tmp_path, make_entry):
    ledger, run = Ledger(tmp_path), demo_run()
    ledger.add_failure(run, "out of\nmemory", "recnet reproduce")
    assert ledger.failed()[run.name]["reason"] == "out of memory"
    assert not ledger.done(run)
    ledger.add(make_entry(run, 60.0))
    assert ledger.failed() == {}


BROKEN = {
    "missing": (lambda e: e.pop("commit"), "'commit' is missing"),
    "unknown": (lambda e: e.update(extra=1), "'extra' is unknown"),
    "text for a number": (lambda e: e.update(seed="0"), "seed: expected integer"),
    "bool for a number": (lambda e: e.update(seed=True), "seed: expected integer"),
    "nan": (lambda e: e.update(seconds=float("nan")), "finite"),
    "percent": (lambda e: e.update(final_accuracy=101.0), "final_accuracy: 101.0 breaks maximum 100"),
    "data set": (lambda e: e.update(dataset="mnist"), "dataset: 'mnist' breaks enum"),
    "deep": (lambda e: e["epochs"][1].pop("lr"), r"epochs\[1\]: 'lr' is missing"),
    "short": (lambda e: e["epochs"].pop(), "epochs: expected 1 to 3"),
    "not the last epoch": (lambda e: e.update(final_accuracy=12.0), "final_accuracy is 12.0"),
    "another seed": (lambda e: e.update(seed=3), "seed is 3, but the recipe's seed is 0"),
    "recipe": (lambda e: e["recipe"].update(lr=-1), "lr must be greater than 0"),
    "version": (lambda e: e["versions"].pop("torch"), "'torch' is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named(name, tmp_path, make_entry):
    entry = make_entry(demo_run(), 77.5)
    assert check_entry(entry) == []
    breaks, message = BROKEN[name]
    breaks(entry)
    with pytest.raises(ValueError, match=message):
        Ledger(tmp_path).add(entry)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_damaged_file_is_an_error_with_its_name(text, tmp_path):
    path = tmp_path / "runs" / "a-run.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecNetsError, match=r"a-run\.json"):
        Ledger(tmp_path).entries()


def test_an_unfinished_folder_is_no_entry(tmp_path):
    with pytest.raises(RecNetsError, match="holds no finished run"):
        entry_from_folder(demo_run(), tmp_path, "recnet reproduce")
    (tmp_path / "summary.json").write_text('{"finished": false, "epochs": 1}')
    with pytest.raises(RecNetsError, match="stopped after 1 of 3 epochs"):
        entry_from_folder(demo_run(), tmp_path, "recnet reproduce")
