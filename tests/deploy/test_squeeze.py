"""`squeeze`: nothing lost, everything that can go is gone, and the result is a RecNet like any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recnets.deploy import optimize, squeeze
from recnets.deploy.squeeze import _plan, _steps, channels, describe
from recnets.models import load_weights, save_weights
from recnets.models.profile import profile
from recnets.models.squeezed import read_mask, recurrent_modules, write_mask

VARIANTS = [
    {},
    {"head": "hidden"},
    {"nonlinearity": "shared_bn_relu"},
    {"nonlinearity": "relu"},
    {"nonlinearity": "linear"},
    {"recurrent": False},
    {"padding_mode": "circular"},
    {"kernel_h": 1},
    {"num_classes": 0},
]


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
@pytest.mark.parametrize("dead", [0.0, 0.3, 0.9, 1.0])
def test_same_outputs_in_every_mode(trained, overrides, dead):
    model = trained(dead=dead, **overrides)
    small = squeeze(model, threshold=0.0)
    x = torch.randn(2, 3, 9, 11)
    for mode in ("concat", "stream"):
        for stage in small.stages:
            for module in stage:
                module.mode = mode
        with torch.no_grad():
            assert_same(small(x), model(x))
    with torch.no_grad():
        assert_same(optimize(small)(x), model(x))
    assert count(small) == count(model) if dead == 0 else count(small) < count(model)


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
@pytest.mark.parametrize("dead", [0.3, 1.0])
def test_masks_are_where_the_weights_are(trained, overrides, dead):
    """Of a network on a GPU all are there: here another default device shows what would be made elsewhere."""
    model = trained(dead=dead, **overrides)
    with torch.no_grad(), torch.device("meta"):
        layers, stem = _plan(model, 0.0)
        steps = [_steps(module, 0.0) for module in recurrent_modules(model).values()]
    masks = [mask for layer in layers.values() for mask in layer] + [stem.outputs, stem.present]
    assert {mask.device.type for mask in [*masks, *(mask for found in steps for mask in found)]} == {"cpu"}


def test_training_goes_on_alike(trained):
    """A constant before BN changes nothing in training either: outputs and gradients of what is left agree."""
    model = trained("RecNet(2, 4, 2)", dead=0.3)
    model.stem.norm.weight.data.fill_(1.0)
    small = squeeze(model, threshold=0.0).train()
    model.train()
    x = torch.randn(4, 3, 8, 8)
    for network in (model, small):
        network(x).square().sum().backward()
    with torch.no_grad():
        assert_same(small(x), model(x))
    old, new = (m.stages[0][0] for m in (model, small))
    rows, columns = (norm.weight.detach() != 0 for norm in (old.transition.norm, old.crc.norm))
    whole = old.transition.conv.weight.grad[rows][:, columns]
    torch.testing.assert_close(new.transition.conv.weight.grad, whole, rtol=1e-4, atol=1e-6)


def test_dead_everywhere_leaves_the_recurrence(trained):
    """A state channel dead and zero in all steps goes from W_x and W_h; a constant that W_h reads does not."""
    model = trained("RecNet(2, 4, 3)")
    crc = model.stages[0][0].crc
    weight, bias = (t.data.view(3, 8) for t in (crc.norm.weight, crc.norm.bias))
    weight[:, [2, 5]] = 0
    bias[:, 2] = -0.1
    bias[2, 2] = 0.7  # the last step's constant is read by the transition only
    bias[:, 5] = 0.3  # this one by W_h
    small = squeeze(model, threshold=0.0)
    assert small.stages[0][0].crc.s_out == 7
    assert small.stages[0][0].transition.c_in == 3 * 8 - 6
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_same(small(x), model(x))


def test_zero_inputs_leave_w_x_and_constant_features_the_classifier(trained):
    model = trained("RecNet(2, 4, 3)")
    first, second = model.stages[0]
    first.transition.norm.weight.data.view(3, 4)[:, 1] = 0
    first.transition.norm.bias.data.view(3, 4)[:, 1] = -1
    first.transition.norm.weight.data[0] = 0  # one segment's channel only: stays as a constant map
    first.transition.norm.bias.data[0] = 0.5
    second.transition.norm.weight.data[:5] = 0
    small = squeeze(model, threshold=0.0)
    assert small.stages[0][1].crc.s_in == 3
    assert small.stages[0][0].transition.c_out == 12 - 3 - 1
    assert small.stages[0][0].transition.expand.constants.tolist() == [0.5]
    assert small.num_features == small.classifier.in_features == 12 - 5
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_same(small(x), model(x))


def test_saves_loads_profiles_and_takes_a_new_classifier(trained, tmp_path):
    model = trained("recnet_60_480", dead=0.2)
    small = squeeze(model)
    path = tmp_path / "small.safetensors"
    save_weights(path, small, {"dataset": "cifar10"})
    again, metadata = load_weights(path)
    assert metadata["parameters"] == count(small)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), small(x))
    assert profile(again).parameters == count(small)
    assert profile(again).macs < profile(model).macs
    again.reset_classifier(7)
    assert again(x).shape == (1, 7)


def test_the_constant_is_the_mean_of_what_it_replaces():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(4)
    norm.weight.data = torch.tensor([0.01, -0.01, 0.005, 0.0])
    norm.bias.data = torch.tensor([0.0, 0.02, -0.1, 0.3])
    z = torch.randn(200_000, 4)
    mean = torch.relu(z * norm.weight.data + norm.bias.data).mean(dim=0)
    found = channels(norm, 1e-2)
    assert found.dead.all()
    torch.testing.assert_close(found.value, mean, rtol=0, atol=1e-4)
    assert found.zero.tolist() == [False, False, True, False]


def test_describe_adds_up(trained):
    model = trained("recnet_60_480", dead=0.2)
    small = squeeze(model)
    rows = describe(model, small)
    assert sum(row.parameters[0] for row in rows) == count(model)
    assert sum(row.parameters[1] for row in rows) == count(small)


def test_masks_round_trip():
    for bits in ([True], [False, True, True], [True] * 9, [False] * 5):
        assert read_mask(write_mask(torch.tensor(bits))).tolist() == bits


def test_errors(trained):
    with pytest.raises(TypeError, match="takes a RecNet, got WideResNet"):
        squeeze(trained("wrn_40_1"))
    with pytest.raises(ValueError, match="squeezed already"):
        squeeze(squeeze(trained(dead=0.2)))
    with pytest.raises(ValueError, match="threshold must be at least 0 and below 1, got -1"):
        squeeze(trained(), threshold=-1)
    with pytest.raises(ValueError, match="no plan of"):
        trained(squeezed={"stem": {}})


def test_wrong_input_is_named(trained):
    module = squeeze(trained(dead=0.4), 0.0).stages[0][0]
    for mode in ("concat", "stream"):
        module.mode = mode
        with pytest.raises(ValueError, match=r"expects .* channels, got 1"):
            module(torch.zeros(1, 1, 4, 4))
