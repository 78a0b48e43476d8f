"""`recnet predict` on every sort of picture, good and bad."""

from __future__ import annotations

import json

import pytest
import torch

from recnets.cli.main import main
from recnets.deploy.check import normalise
from recnets.deploy.predict import predict
from recnets.models import load_weights, read_metadata, save_weights

Image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'data'")


@pytest.fixture
def weights(trained, tmp_path):
    path = tmp_path / "net.safetensors"
    metadata = {
        "classes": ["ant", "bee", "cat"],
        "image_size": [8, 8],
        "normalisation": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]},
    }
    save_weights(path, trained("RecNet(2, 4, 2)", num_classes=3), metadata)
    return path


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    noise = Image.fromarray(torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy())
    noise.save(folder / "a.png")
    noise.resize((300, 200)).save(folder / "b.jpg")
    noise.convert("L").save(folder / "c.webp")
    noise.convert("RGBA").save(folder / "d.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    noise.resize((20, 10)).save(folder / "e.jpg", exif=turned)
    return folder


def run(capsys, *args: str) -> tuple[int, str, str]:
    status = main(["predict", *args]) or 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_probabilities_are_the_models(weights, folder, capsys):
    status, out, _ = run(capsys, str(folder), "--weights", str(weights), "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["image"].rsplit("/", 1)[-1] for row in rows] == ["a.png", "b.jpg", "c.webp", "d.png", "e.jpg"]
    assert all(abs(sum(c["probability"] for c in row["classes"]) - 1) < 1e-5 for row in rows)
    model, metadata = load_weights(weights)
    with Image.open(folder / "a.png") as picture:
        pixels = torch.tensor(list(picture.tobytes()), dtype=torch.uint8).view(8, 8, 3).permute(2, 0, 1)
    with torch.no_grad():
        expected = model(normalise(pixels[None], metadata)).softmax(dim=1)[0]
    got = {c["name"]: c["probability"] for c in rows[0]["classes"]}
    assert [got[name] for name in ("ant", "bee", "cat")] == pytest.approx(expected.tolist(), abs=1e-6)


def test_table_shows_the_top_classes(weights, folder, capsys):
    status, out, _ = run(capsys, str(folder / "a.png"), "--weights", str(weights), "--top", "1")
    assert status == 0
    assert sum(name in out for name in ("ant", "bee", "cat")) == 1
    assert "%" in out


def test_bad_pictures_are_named_and_the_rest_runs(weights, folder, capsys, monkeypatch):
    (folder / "text.png").write_text("not a picture")
    (folder / "zero.png").touch()
    Image.new("L", (700, 700)).save(folder / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)  # more than twice that is refused
    status, out, err = run(capsys, str(folder), str(folder / "gone.png"), "--weights", str(weights), "--json")
    rows = {row["image"].rsplit("/", 1)[-1]: row for row in json.loads(out)}
    assert status == 1
    reasons = {"text.png": "no picture", "zero.png": "is empty", "bomb.png": "too many pixels", "gone.png": "no such"}
    for name, reason in reasons.items():
        assert reason in rows[name]["error"]
        assert name in err
    assert rows["a.png"]["error"] is None
    assert "Traceback" not in err


def test_by_default_a_published_network_says_cifar_100s_classes(folder, capsys):
    status, out, err = run(capsys, str(folder / "a.png"), "--json")
    assert status == 0
    classes = read_metadata("recnet_60_1280.cifar100")["classes"]
    assert {c["name"] for c in json.loads(out)[0]["classes"]} <= set(classes)
    assert "CIFAR-100's, by recnet_60_1280.cifar100" in err


def test_the_model_stays_as_it_is(weights, folder):
    model, metadata = load_weights(weights)
    model.train()
    assert len(list(predict(model, metadata, [folder]))) == 5
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="name 2 classes, the model has num_classes=3"):
        next(predict(model, {**metadata, "classes": ["ant", "bee"]}, [folder]))


def test_wrong_use(weights, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run(capsys, str(tmp_path / "empty"), "--weights", str(weights))[0] == 1
    assert run(capsys, str(tmp_path), "--weights", str(weights), "--top", "0")[0] == 2
