"""Channels that are zero whatever the picture: found, not computed, and missed by no one."""

from __future__ import annotations

import pytest
import torch

from recnets.deploy import live, optimize, squeeze
from recnets.deploy.int8 import to_int8
from recnets.deploy.live import affines, in_blocks, live_channels, read_channels
from recnets.deploy.onnx import Session, to_onnx
from recnets.deploy.unrolled import TRANSITIONS, Unrolled

NETWORK = "RecNet(2, 4, 4, 4, 3)"


def difference(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def alive(module):
    return live_channels(*affines(module), read_channels(module))


def switch_off(model, step, channels=slice(None)):
    """Make channels of a step of the first module zero."""
    crc = model.stages[0][0].crc
    for tensor, value in ((crc.norm.weight, 0.0), (crc.norm.bias, -0.1)):
        tensor.data.view(crc.d, crc.s_out)[step, channels] = value
    return model


def test_zero_for_every_picture(trained, monkeypatch):
    module = trained(NETWORK).stages[0][0]
    weight, bias = (t.data.view(4, 8) for t in (module.crc.norm.weight, module.crc.norm.bias))
    weight[0, [1, 2, 3]], bias[0, 1], bias[0, 2], bias[0, 3] = 0.0, -0.5, 0.0, 0.5
    weight[2], bias[2] = 0.0, -1.0
    found = alive(module)
    assert found[0].tolist() == [True, False, False, True] + [True] * 4  # the last of them is 0.5 everywhere
    assert not found[2].any()
    assert found[[1, 3]].all()
    monkeypatch.setattr(live, "BLOCK", 4)
    assert in_blocks(found).sum(dim=1).tolist() == [8, 8, 0, 8]
    monkeypatch.setattr(live, "BLOCK", 7)
    assert in_blocks(found).sum(dim=1).tolist() == [7, 8, 0, 8]
    assert found.sum(dim=1).tolist() == [6, 8, 0, 8]


def test_a_relu_alone_has_no_zeros(trained):
    assert alive(trained(NETWORK, nonlinearity="relu").stages[0][0]).all()


def test_of_nothing_one_channel_is_left(trained):
    model = switch_off(trained(NETWORK), slice(None))
    assert alive(model.stages[0][0]).sum() == 1
    assert alive(squeeze(model, 0.0).stages[0][0]).sum() == 1


@pytest.mark.parametrize("overrides", [{}, {"kernel_h": 1}, {"kernel_x": 5, "padding_mode": "circular"}], ids=str)
@pytest.mark.parametrize("dead", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("block", [1, 3])
def test_nothing_is_missed(trained, monkeypatch, overrides, dead, block):
    monkeypatch.setattr(live, "BLOCK", block)
    model = switch_off(trained(NETWORK, dead=dead, **overrides), 1)
    x = torch.randn(2, 3, 9, 11)
    for network in (model, squeeze(model, 0.0)):
        with torch.no_grad():
            expected = model(x)
            for transition in TRANSITIONS:
                unrolled = Unrolled(network, transition, "weights")
                assert unrolled.stages[0][0].widths[1] == 0
                assert difference(unrolled(x), expected) < 1e-5
            for mode in ("stream", "concat", "packed"):
                fast = optimize(network, mode=mode, scale="folded", image_size=(9, 11))
                assert fast.stages[0][0].counts[1] == 0
                assert difference(fast(x), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("squeezed", [False, True])
def test_files(trained, monkeypatch, squeezed):
    """A file holds W_x and W_h once, whole, and the columns of the transition that are read."""
    onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
    monkeypatch.setattr(live, "BLOCK", 2)
    model = switch_off(trained("RecNet(4, 8, 4)", dead=0.4), 1)
    small = squeeze(model, 0.0) if squeezed else model
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = model(x)
    kept = 4 * sum(p.numel() for p in squeeze(model, 0.0).parameters())
    for transition in TRANSITIONS:
        content = to_onnx(Unrolled(small, transition, "weights"), 3, (12, 12), {})
        assert difference(Session(content)(x), expected) < 1e-5
        tensors = [onnx.numpy_helper.to_array(t) for t in onnx.load_from_string(content).graph.initializer]
        # Constants that are no columns of their own stay in a network that is not squeezed.
        assert sum(t.nbytes for t in tensors if t.dtype == "float32") < (1.05 if squeezed else 1.4) * kept
    assert difference(Session(to_int8(small, x, (12, 12), {}))(x), expected) < 0.05


def test_squeezing_makes_what_counts_as_zero_exactly_that(trained):
    model = switch_off(trained(NETWORK), slice(None), 5)
    norm = model.stages[0][0].crc.norm
    weight, bias = norm.weight.data.view(4, 8), norm.bias.data.view(4, 8)
    weight[0, :2] = 1e-6
    bias[0, 0], bias[0, 1] = 5e-5, -0.2
    small = squeeze(model)
    norm = small.stages[0][0].crc.norm
    assert norm.weight.view(4, 7)[0].eq(0).tolist() == [True, True] + [False] * 5
    assert norm.bias.view(4, 7)[0, 0] == 0
    assert alive(small.stages[0][0]).sum(dim=1).tolist() == [5, 7, 7, 7]
    x = torch.randn(2, 3, 9, 11)
    with torch.no_grad():
        assert difference(small(x), model(x)) < 1e-3
    small.train()(x).sum().backward()  # and it stays so in training
    assert norm.weight.grad.view(4, 7)[0, :2].eq(0).all()
    assert norm.bias.grad.view(4, 7)[0, :2].eq(0).all()


def test_masks_do_not_follow_the_default_device(trained):
    module = trained(NETWORK).stages[0][0]
    with torch.device("meta"):
        assert alive(module).all()
