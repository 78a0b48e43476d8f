"""scripts/diagnose_run.py: precision and BN's statistics of a trained network."""

from __future__ import annotations

import sys

import pytest
import torch

from recnets.data import DataSet, Split
from recnets.models import create_model, save_weights

NORM = {"mean": (0.5,), "std": (0.25,)}


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("diagnose_run")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create_model("recnet_60_480", num_classes=10, in_channels=1, e=1, s=(4, 4), d=(2, 2))


@pytest.fixture(scope="module")
def split():
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 1, 8, 8), dtype=torch.uint8, generator=g)
    return Split(images, torch.randint(0, 10, (48,), generator=g))


def test_gradients_differ_by_their_precision(script, model, split):
    images = split.images.float() / 255
    exact = script.gradient(model, images, split.labels, torch.float64)
    assert exact.numel() == sum(p.numel() for p in model.parameters())
    errors = [
        float((script.gradient(model, images, split.labels, dtype) - exact).norm() / exact.norm())
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 0.5


def test_channels_that_training_switched_off(script, model):
    assert script.dead(model) == [(0, 8)] * 4
    with torch.no_grad():
        model.stages[1][0].crc.norm.weight[:3] = torch.tensor([0.009, -0.001, 0.011])
    assert script.dead(model) == [(0, 8), (0, 8), (2, 8), (0, 8)]
    assert script.cut(model) == (0, 8)
    with torch.no_grad():
        model.stages[1][0].crc.norm.weight[4:] = 0
    assert script.cut(model) == (1, 8)


def test_the_command_prints_all(script, model, split, tmp_path, monkeypatch, capsys):
    metadata = {"dataset": "digits", "normalisation": {key: list(value) for key, value in NORM.items()}}
    save_weights(tmp_path / "last.safetensors", model, metadata)
    data = DataSet("digits", split, split, None, [str(i) for i in range(10)], **NORM)
    monkeypatch.setattr(script, "load_dataset", lambda name, data_dir: data)
    monkeypatch.setattr(sys, "argv", ["diagnose_run.py", str(tmp_path / "last.safetensors"), "--batches", "2"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--draws", "2"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "step channels switched off",
        "steps that pass nothing on",
        "gradient in float32",
        "gradient in float16",
        "gradient in bfloat16",
        "accuracy as saved",
        "accuracy with BN's statistics from 2 batches",
        "draw 1",
        "draw 2",
    ]
