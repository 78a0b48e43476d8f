"""`recnet squeeze` from a weights file to a smaller one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from recnets.cli.main import main
from recnets.data import load_dataset
from recnets.models import load_weights, read_metadata, save_weights

pytest.importorskip("sklearn", reason="the digits need the extra 'data'")


@pytest.fixture
def source(trained, tmp_path):
    """Weights for the digits with a third of their channels dead."""
    data = load_dataset("digits")
    model = trained("RecNet(2, 4, 3)", dead=0.3, in_channels=data.in_channels)
    path = tmp_path / "whole.safetensors"
    normalisation = {"mean": list(data.mean), "std": list(data.std)}
    metadata = {"dataset": "digits", "classes": data.classes, "normalisation": normalisation, "accuracy": 12.0}
    save_weights(path, model, metadata)
    return path


def test_writes_a_smaller_file_that_predicts_the_same(source, tmp_path, capsys):
    out = tmp_path / "small.safetensors"
    assert main(["squeeze", str(source), "--out", str(out)]) in (0, None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 predictions changed" in printed
    assert "stages.0.1" in printed
    whole, small = read_metadata(source), read_metadata(out)
    assert small["parameters"] < whole["parameters"]
    assert small["squeezed"]["parameters_before"] == whole["parameters"]
    assert small["accuracy"] != 12.0  # the digits' whole test set was seen: measured, not copied
    model, _ = load_weights(out)
    assert model(torch.zeros(1, model.in_channels, 8, 8)).shape == (1, 10)


def test_half_precision_halves_the_file(source, tmp_path):
    sizes = {}
    for name, options in (("single", []), ("half", ["--half"])):
        out = tmp_path / f"{name}.safetensors"
        assert main(["squeeze", str(source), "--out", str(out), "--max-changed", "5", *options]) in (0, None)
        sizes[name] = sum(t.numel() * t.element_size() for t in load_file(out).values() if t.is_floating_point())
    assert sizes["half"] * 2 == sizes["single"]


def test_refuses_to_lose_predictions(source, tmp_path, capsys):
    out = tmp_path / "small.safetensors"
    model, metadata = load_weights(source)
    with torch.no_grad():  # centred, so that the untrained model does not name one class for every picture
        model.classifier.bias -= model(load_dataset("digits").test.images.float() / 16).mean(0)
    save_weights(source, model, metadata)
    assert main(["squeeze", str(source), "--out", str(out), "--threshold", "0.99"]) == 1
    error = capsys.readouterr().err
    assert "predictions changed" in error
    assert "nothing is written" in error.replace("\n", " ")
    assert not out.exists()


@pytest.mark.parametrize("known", [True, False])
def test_folders_with_unreadable_pictures_as_in_training(trained, tmp_path, capsys, known):
    """What share of a folder may be bad is what training allowed, or --max-bad."""
    image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'data'")
    for name in ("cat", "dog"):
        for i in range(10):
            path = tmp_path / "pictures" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.new("RGB", (8, 8), (25 * i,) * 3).save(path)
        (path.parent / "broken.png").write_text("no picture")
    metadata = {"recipe": {"data": f"folder:{tmp_path / 'pictures'}"}, "classes": ["cat", "dog"], "image_size": [8, 8]}
    metadata["normalisation"] = {"mean": [0.5] * 3, "std": [0.2] * 3}
    source, out = tmp_path / "net.safetensors", tmp_path / "small.safetensors"
    save_weights(source, trained("RecNet(2, 4, 2)", num_classes=2), metadata | ({"max_bad": 0.5} if known else {}))
    options = [] if known else ["--max-bad", "0.5"]
    assert main(["squeeze", str(source), "--out", str(out), *options]) in (0, None), capsys.readouterr().err
    assert known or main(["squeeze", str(source), "--out", str(out)]) == 1


def test_a_place_that_cannot_be_written(source, tmp_path, capsys):
    assert main(["squeeze", str(source), "--out", str(tmp_path / "absent" / "small.safetensors")]) == 1
    captured = capsys.readouterr()
    assert "there is no folder" in captured.err
    assert captured.out == ""
    assert main(["squeeze", str(source), "--out", str(tmp_path / "x.safetensors"), "--max-changed", "-1"]) == 2


def test_needs_to_know_the_data(trained, tmp_path, capsys):
    path = tmp_path / "bare.safetensors"
    save_weights(path, trained(), {})
    assert main(["squeeze", str(path), "--out", str(tmp_path / "x.safetensors")]) == 1
    assert "give --data" in capsys.readouterr().err
