"""8-bit files: integers stored once, negative BN weights exact, accuracy kept or nothing written."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from recnets.cli.main import main
from recnets.data import load_dataset
from recnets.deploy import int8, squeeze
from recnets.deploy.check import Comparison
from recnets.deploy.export import export_int8
from recnets.deploy.int8 import to_int8
from recnets.deploy.onnx import Session
from recnets.models import save_weights

onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")


def with_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """Running statistics of these pictures, so that activations have the ranges of a trained network."""
    model.train()
    with torch.no_grad():
        for _ in range(40):
            model(x)
    return model.eval()


def error(model: nn.Module, content: bytes, x: Tensor) -> float:
    """RMS error of the logits relative to the RMS of the logits."""
    with torch.no_grad():
        expected = model(x)
    got = Session(content)(x)
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def smooth(count: int, channels: int = 3, side: int = 12) -> Tensor:
    """Pictures with structure: noise alone averages out, and all logits would be alike."""
    torch.manual_seed(3)
    coarse = torch.randn(count, channels, 3, 3)
    return nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")


VARIANTS = [
    {},
    {"head": "hidden"},
    {"nonlinearity": "shared_bn_relu"},
    {"kernel_h": 1},
    {"kernel_x": 1},
    {"d": (1,)},
]


def signed(trained, x: Tensor, negative: float, **overrides) -> nn.Module:
    """A network with statistics of `x`, a share `negative` of whose BN weights is negative."""
    model = trained("RecNet(2, 4, 4)", **overrides)
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            chance = torch.rand(module.weight.shape, generator=generator)
            module.weight.data.copy_(module.weight.data.abs() * torch.where(chance < negative, -1.0, 1.0))
    return with_statistics(model, x)


def bound(overrides) -> float:
    """Between rounding and one wrong sign a layer, which were measured: 0.019 and 0.10 at least with the linear head.

    The hidden head normalises the features, whose spread over these pictures is a third of their size, and rounds two
    matrices: 0.052 and 0.52 there.
    """
    return 0.15 if overrides.get("head") == "hidden" else 0.04


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
@pytest.mark.parametrize("negative", [0.0, 0.3, 1.0])
def test_close_to_float_with_bn_weights_of_any_sign(trained, overrides, negative):
    x = smooth(48)
    model = signed(trained, x, negative, **overrides)
    assert error(model, to_int8(model, x[:32], (12, 12), {}), x) < bound(overrides)


@pytest.mark.parametrize("overrides", [{}, {"head": "hidden"}, {"kernel_h": 1}, {"kernel_x": 1}], ids=str)
def test_one_wrong_sign_a_layer_would_show(trained, monkeypatch, overrides):
    """The control of the test above: forget to negate one channel in one step of each layer."""
    start = int8._Recurrence.__init__

    def forgetful(self, *args) -> None:
        start(self, *args)
        step, channel = (self.rows >= self.module.s_out).nonzero()[0].tolist()
        self.rows[step, channel] = channel

    monkeypatch.setattr(int8._Recurrence, "__init__", forgetful)
    x = smooth(48)
    model = signed(trained, x, 0.3, **overrides)
    assert error(model, to_int8(model, x[:32], (12, 12), {}), x) > bound(overrides)


@pytest.mark.parametrize("dead", [0.3, 0.8])
def test_dead_channels_and_squeezed_networks(trained, dead):
    x = smooth(48)
    model = with_statistics(trained("RecNet(2, 4, 4)", dead=dead), x)
    assert error(model, to_int8(model, x, (12, 12), {}), x) < 0.05
    assert error(model, to_int8(squeeze(model, 0.0), x, (12, 12), {}), x) < 0.05


def test_integers_are_stored_once(trained):
    model = trained("recnet_60_480", num_classes=100)
    content = to_int8(model, smooth(4, side=32), (32, 32), {"dataset": "none"})
    proto = onnx.load_from_string(content)
    sizes = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    crc = model.stages[0][0].crc
    rows, *rest = sizes["0.0.w"].shape
    assert rest == [crc.s_in + crc.s_out, 3, 3]
    assert crc.s_out <= rows <= 2 * crc.s_out
    assert sizes["0.0.w"].dtype == "int8"
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert len(content) < 0.35 * whole


def test_batches_of_any_size(trained):
    model = trained("RecNet(2, 4, 2)")
    session = Session(to_int8(model, smooth(4), (12, 12), {}))
    assert [tuple(session(smooth(n)).shape) for n in (1, 2, 7)] == [(1, 10), (2, 10), (7, 10)]


def test_other_padding_is_refused(trained):
    with pytest.raises(ValueError, match="padding_mode='zeros', this RecNet has 'circular'"):
        to_int8(trained(padding_mode="circular"), smooth(2), (12, 12), {})


@pytest.fixture
def digits(trained, tmp_path):
    """An untrained network for the digits, and its weights file."""
    pytest.importorskip("sklearn", reason="the digits need the extra 'data'")
    data = load_dataset("digits")
    model = trained("RecNet(2, 4, 3)", in_channels=data.in_channels)
    path = tmp_path / "net.safetensors"
    normalisation = {"mean": list(data.mean), "std": list(data.std)}
    save_weights(path, model, {"dataset": "digits", "classes": data.classes, "normalisation": normalisation})
    return path


def test_the_model_stays_as_it_is(trained, snapshot):
    model = trained("RecNet(2, 4, 2)").train()
    before = snapshot(model)
    to_int8(model, smooth(2), (12, 12), {})
    assert snapshot(model) == before


def test_command_writes_or_says_what_was_lost(digits, tmp_path, capsys, monkeypatch):
    out = tmp_path / "net.onnx"
    command = ["export", str(digits), "--format", "onnx-int8", "--out", str(out)]
    assert main([*command, "--max-loss", "-1"]) == 2
    assert "max_loss must be at least 0, got -1" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(export_int8.__globals__, "compare", lambda *_: Comparison(360, 1.0, 9, 97.5, 95.0))
        assert main([*command, "--max-loss", "2"]) == 1
    assert "points of accuracy, nothing is written" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    assert main([*command, "--max-loss", "100"]) in (0, None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "360 pictures" in printed
    onnx = pytest.importorskip("onnx")
    about = json.loads(onnx.load(out).metadata_props[0].value)
    assert f"-> {about['accuracy']:.2f} %" in printed  # its own, not that of the weights
    assert about["image_size"] == [8, 8]
