"""The ledger: what is in it is checked, whole, and right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from recnets.errors import RecNetsError
from recnets.experiments import job
from recnets.experiments.cost import cost
from recnets.experiments.ledger import Ledger, check_entry, entry_from_folder
from recnets.experiments.paper import TABLES
from recnets.experiments.runs import Protocol
from recnets.experiments.sessions import commits, gaps, sessions_of, speed
from recnets.training import RunFolder
from recnets.utils import versions

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


def test_a_run_older_than_a_setting_was_run_with_its_default(tmp_path, make_entry):
    ledger = Ledger(tmp_path)
    entry = make_entry(demo_run(), 77.5)
    entry["recipe"] = {key: value for key, value in entry["recipe"].items() if key != "init"}
    ledger.add(entry)
    assert ledger.done(demo_run())


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
    "a session too few": (lambda e: e["sessions"][0].update(last_epoch=2), "expected to end with epoch 3, got 2"),
    "a gap": (lambda e: e["sessions"].append({**e["sessions"][0], "first_epoch": 5, "last_epoch": 3}), "4 was next"),
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


START = {"started": "2026-01-01 00:00:00 +0000", "device": "a device", "versions": versions()}


def starts(*places):
    """Sessions of a config.toml that began at these (epoch, step), with commits a, b, ..."""
    return [{**START, "epoch": e, "step": s, "commit": c} for (e, s), c in zip(places, "abcdef", strict=False)]


def rows(*speeds):
    return [{"epoch": i, "images_per_second": v, "input_share": v / 1000} for i, v in enumerate(speeds, 1)]


def spans(found):
    return [(s["commit"], s["first_epoch"], s["from_step"], s["last_epoch"]) for s in found]


def test_sessions_of_a_run_that_was_left_alone():
    (session,) = sessions_of(starts((0, 0)), rows(1.0, 20.0, 40.0, 30.0))
    assert spans([session]) == [("a", 1, 0, 4)]
    assert (session["images_per_second"], session["input_share"]) == (30.0, 0.03)  # the first epoch is warm-up
    assert gaps([session], 4) == []
    assert commits([session]) == "a"


def test_sessions_of_a_run_that_was_resumed():
    """Cut within an epoch, at an epoch's end, and killed twice before a new checkpoint."""
    found = sessions_of(starts((0, 0), (0, 7), (2, 0), (2, 0), (2, 0)), rows(1.0, 10.0, 2.0, 50.0, 60.0))
    assert spans(found) == [("a", 1, 0, 1), ("b", 1, 7, 2), ("e", 3, 0, 5)]
    assert [s["images_per_second"] for s in found] == [None, 10.0, 55.0]
    assert gaps(found, 5) == []
    assert speed(found) == 55.0  # of the session with the most epochs
    assert commits(found) == "a (1), b (1–2), e (3–5)"
    assert len(gaps(found[1:], 5)) == 1
    assert len(gaps([found[0], found[2]], 5)) == 1


def test_sessions_after_an_older_checkpoint_was_taken_up():
    """What the sessions in between had trained is lost, and so are they."""
    found = sessions_of(starts((0, 0), (4, 0), (6, 2), (1, 3)), rows(*range(1, 9)))
    assert spans(found) == [("a", 1, 0, 2), ("d", 2, 3, 8)]
    assert gaps(found, 8) == []


def test_an_entry_says_who_trained_what(tmp_path, monkeypatch):
    """A folder that ended elsewhere: its entry is read from it, without training or evaluating anything."""
    run, folder = demo_run(), RunFolder(tmp_path)
    for start in starts((0, 0), (1, 0)):
        folder.write_config(run.recipe, start)
    history = [
        {**row, "train_loss": 1.0, "test_accuracy": 90.0, "lr": 0.1, "seconds": float(row["epoch"])}
        for row in rows(5.0, 300.0, 500.0)
    ]
    folder.rewrite_metrics(history)
    summary = {"finished": True, "final_accuracy": 90.0, "final_top5": 99.0, "final_loss": 0.5, "seconds": 3.5}
    size = cost(run.model, run.overrides, run.dataset)
    summary |= {
        "parameters": size.parameters,
        "images_per_second": 7.0,
        **{k: START[k] for k in ("device", "versions")},
    }
    folder.summary.write_text(json.dumps({**summary, "commit": "b"}))
    os.utime(folder.summary, (1e9, 1e9))
    monkeypatch.setattr(job, "train", lambda *a, **k: pytest.fail("it has ended"))
    result = job.perform(job.Job(run.name, run.recipe.to_dict(), "quick", str(tmp_path), "recnet reproduce"))
    entry = result["entry"]
    assert check_entry(entry) == []
    assert commits(entry["sessions"]) == "a (1), b (2–3)"
    assert entry["images_per_second"] == 500.0
    assert [row["input_share"] for row in entry["epochs"]] == [0.005, 0.3, 0.5]
    assert entry["finished"].startswith("2001-09-0")
    path = Ledger(tmp_path / "results").add(entry)
    assert sum('"first_epoch"' in line for line in path.read_text().splitlines()) == 2  # one line each


def test_an_unfinished_folder_is_no_entry(tmp_path):
    with pytest.raises(RecNetsError, match="holds no finished run"):
        entry_from_folder(demo_run(), tmp_path, "recnet reproduce")
    (tmp_path / "summary.json").write_text('{"finished": false, "epochs": 1}')
    with pytest.raises(RecNetsError, match="stopped after 1 of 3 epochs"):
        entry_from_folder(demo_run(), tmp_path, "recnet reproduce")
