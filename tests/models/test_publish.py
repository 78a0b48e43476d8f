"""scripts/publish_weights.py: a run becomes a file of 16 bits that says how it came about."""

from __future__ import annotations

import sys

import pytest
import torch

from recnets.models import create_model, load_weights, save_weights, weights
from recnets.training import RunFolder, load_recipe
from recnets.utils import versions


@pytest.fixture
def script(load_script, monkeypatch, tmp_path):
    module = load_script("publish_weights")
    shelf = tmp_path / "weights"
    monkeypatch.setattr(module, "PUBLISHED_FOLDER", shelf)
    monkeypatch.setattr(weights, "PUBLISHED_FOLDER", shelf)
    return module


@pytest.fixture
def run(tmp_path):
    """A folder as a run of digits leaves it that two commits trained; the weights are untrained."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    model = create_model("recnet_60_480", num_classes=10, in_channels=1, e=1, s=(2, 2), d=(1, 2))
    about = {"started": "2026-01-01 00:00:00 +0000", "device": "cpu", "versions": versions()}
    for epoch, commit in ((0, "a" * 40), (1, "b" * 40)):
        folder.write_config(load_recipe("quick"), {**about, "epoch": epoch, "step": 0, "commit": commit})
    folder.rewrite_metrics([{"epoch": e, "images_per_second": 1.0, "input_share": 0.0} for e in (1, 2, 3)])
    metadata = {
        "dataset": "digits",
        "normalisation": {"mean": [0.3], "std": [0.4]},
        "accuracy": 97.0,
        "commit": "b" * 40,
        "command": "/home/me/bin/recnet train --data digits --out /home/me/run --seed 3",
    }
    save_weights(folder.last, model, metadata)
    return folder.path, model


def test_a_run_is_published(script, run, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the extra 'data' is not installed")
    path, model = run
    monkeypatch.setattr(sys, "argv", ["publish_weights.py", str(path), "recnet_60_480.digits"])
    script.main()
    found, metadata = load_weights("recnet_60_480.digits")
    assert torch.equal(found.classifier.weight, model.classifier.weight.half().float())
    assert metadata["trained_accuracy"] == 97.0
    assert metadata["accuracy"] < 50.0  # of the file itself, whose weights are untrained
    assert f"{metadata['accuracy']} % on the test set" in capsys.readouterr().out
    assert metadata["command"] == "recnet train --data digits --seed 3"
    assert metadata["commits"] == "aaaaaaaaa (1), bbbbbbbbb (2–3)"


def test_the_name_must_be_the_networks(script, run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["publish_weights.py", str(run[0]), "recnet_60_640.digits"])
    with pytest.raises(SystemExit, match=r"the name must be recnet_60_480.TAG"):
        script.main()


def test_one_commit_needs_no_list(script, run):
    path, _ = run
    (path / "metrics.jsonl").write_text('{"epoch": 1, "images_per_second": 1.0, "input_share": 0.0}\n')
    assert script.commits_of(str(path)) == {}
    assert script.commits_of(str(path / "last.safetensors")) == {}
