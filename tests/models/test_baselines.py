"""The networks of Table 3: exact sizes, behaviour, and the same weights run by pytorchcv."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from recnets.models import baselines, create_model, list_models, model_info
from recnets.models.baselines import pyramidnet
from recnets.models.baselines.common import PadChannels, conv_bn
from recnets.models.baselines.googlenet import STAGES, Inception, Widths


class Row(NamedTuple):
    """A row of Table 3: parameters with 10 and 100 classes, multiply-adds of a 32×32 picture with 100 classes."""

    params_10: int
    params_100: int
    macs: int
    table: float  # millions, as Table 3 prints it
    own: float | None  # millions, as the network's own paper prints it for CIFAR; None where it does not


TABLE = {
    "googlenet": Row(6_158_346, 6_250_596, 1_521_848_320, 6.8, None),
    "resnet_110": Row(1_727_962, 1_733_812, 252_893_440, 1.7, 1.7),
    "wrn_40_1": Row(563_930, 569_780, 83_286_272, 0.6, 0.6),
    "wrn_40_2": Row(2_243_546, 2_255_156, 327_610_880, 2.2, 2.2),
    "wrn_40_4": Row(8_949_210, 8_972_340, 1_298_605_056, 8.9, 8.9),
    "mobilenet": Row(3_217_226, 3_309_476, 46_446_592, 3.3, None),
    "resnext_29_1x64d": Row(4_914_250, 5_006_500, 748_457_984, 4.5, None),
    "pyramidnet_110_48": Row(1_772_706, 1_778_556, 403_819_264, 1.7, 1.7),
    "pyramidnet_110_84": Row(3_904_446, 3_913_536, 772_177_168, 3.8, 3.8),
    "densenet_40_12": Row(1_019_722, 1_060_132, 264_853_248, 1.0, 1.0),
    "densenet_100_12": Row(6_979_642, 7_084_852, 1_769_621_568, 7.0, 7.0),
    "densenet_bc_40_18": Row(390_970, 408_880, 162_341_208, 0.4, None),
    "densenet_bc_100_12": Row(769_162, 800_032, 287_960_472, 0.8, 0.8),
}
DIFFERS = {"googlenet", "resnext_29_1x64d", "pyramidnet_110_48", "pyramidnet_110_84"}  # the notes say why


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(build: Callable[..., nn.Module], *args: object, **kwargs: object) -> nn.Module:
    """Structure without numbers: fast for the big ones."""
    with torch.device("meta"):
        return build(*args, **kwargs).eval()


# Sizes


def test_every_network_of_table_3_is_registered_in_its_order() -> None:
    assert [name for name in list_models() if name in TABLE] == list(TABLE)


@pytest.mark.parametrize(("name", "row"), TABLE.items())
def test_exact_sizes(name: str, row: Row) -> None:
    small, large = (on_meta(create_model, name, num_classes=n) for n in (10, 100))
    assert (count(small), count(large)) == (row.params_10, row.params_100)
    with FlopCounterMode(display=False) as counter:
        logits = large(torch.empty(1, 3, 32, 32, device="meta"))
    assert logits.shape == (1, 100)
    assert counter.get_total_flops() == 2 * row.macs


@pytest.mark.parametrize(("name", "row"), TABLE.items())
def test_sizes_against_the_papers(name: str, row: Row) -> None:
    """Either number of classes may stand behind a printed figure; the note gives the exact count."""
    rounded = {round(p / 1e6, 1) for p in (row.params_10, row.params_100)}
    assert (row.table in rounded) == (name not in DIFFERS)
    assert row.own is None or row.own in rounded or name in DIFFERS
    info = model_info(name)
    assert info.paper_params == f"{row.table}M"
    assert f"{row.params_100:,}" in info.note


def test_figures_of_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def params(build: Callable[..., nn.Module], *args: object, **kwargs: object) -> int:
        return count(on_meta(build, *args, **{"num_classes": 100, **kwargs}))

    # ResNeXt: its paper's larger networks; the width that would fit Table 3; without projections
    assert params(baselines.ResNeXt, 29, 8, 64, num_classes=10) == 34_426_698
    assert params(baselines.ResNeXt, 29, 16, 64, num_classes=10) == 68_155_210
    assert params(baselines.ResNeXt, 29, 1, 59) == 4_509_855
    resnext = on_meta(create_model, "resnext_29_1x64d", num_classes=100)
    assert count(resnext) - sum(count(unit.shortcut) for unit in resnext.features[1:]) == 4_331_172
    # ResNet: projections instead of padding
    assert params(baselines.ResNet, 110, shortcut="projection") == TABLE["resnet_110"].params_100 + 2_752
    # MobileNet: the ImageNet network has the same maps
    assert params(baselines.MobileNet, num_classes=1000) == 4_231_976
    # PyramidNet: widths rounded down, as its formula has them
    monkeypatch.setattr(pyramidnet, "pyramid_widths", lambda a, n: [16 + a * k // n for k in range(1, n + 1)])
    assert params(baselines.PyramidNet, 110, 48) == 1_745_580
    assert params(baselines.PyramidNet, 110, 84) == 3_864_144


def test_googlenet_has_the_widths_of_its_paper() -> None:
    assert [w.out for stage in STAGES for w in stage] == [256, 480, 512, 512, 512, 528, 832, 832, 1024]


# Behaviour


@pytest.mark.parametrize("name", TABLE)
def test_one_step_on_an_odd_picture(name: str) -> None:
    """Another number of channels and classes, sides that do not halve; every parameter gets a gradient."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=7, in_channels=1)
    assert (model.num_classes, model.in_channels) == (7, 1)
    x = torch.randn(2, 1, 11, 13)
    features = model.forward_features(x)
    assert features.shape[:2] == (2, model.num_features)
    logits = model(x)
    assert logits.shape == (2, 7)
    F.cross_entropy(logits, torch.tensor([0, 6])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
    rebuilt = model.config.build()
    assert [(k, v.shape) for k, v in rebuilt.state_dict().items()] == [
        (k, v.shape) for k, v in model.state_dict().items()
    ]


@pytest.mark.parametrize("name", ["mobilenet", "densenet_bc_40_18"])
def test_reset_classifier(name: str) -> None:
    model = create_model(name, num_classes=10).double().eval()
    before = {key: value.clone() for key, value in model.features.state_dict().items()}
    model.reset_classifier(3)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert model(x).shape == (2, 3)
    assert model.num_classes == 3
    assert all(torch.equal(before[key], value) for key, value in model.features.state_dict().items())
    model.reset_classifier(0)
    assert torch.equal(model(x), model.forward_head(model.forward_features(x), pre_logits=True))
    assert model(x).shape == (2, model.num_features)


def test_initialisation() -> None:
    torch.manual_seed(0)
    wide = baselines.WideResNet(10, 4)
    weight = wide.features[-2].body[-1].weight  # 3×3, 256 to 256
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.01)
    mobile = create_model("mobilenet")
    weights = [m.weight for m in mobile.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weights) == 28
    assert max(w.abs().max().item() for w in weights) <= 0.18
    # the deviation of a normal cut off at two of its own
    assert weights[-2].std().item() == pytest.approx(0.09 * 0.8796, rel=0.01)
    for model in (wide, mobile):
        assert not model.classifier.bias.any()


@pytest.mark.parametrize("pool", [False, True])
def test_pad_channels(pool: bool) -> None:
    x = torch.randn(2, 3, 5, 8)
    y = PadChannels(2, 2, pool=pool)(x)
    assert y.shape == conv_bn(3, 5, 3, 2)(x).shape == (2, 5, 3, 4)
    assert not y[:, 3:].any()
    if pool:
        torch.testing.assert_close(y[:, :3, 1, 2], x[:, :, 2:4, 4:6].mean((2, 3)))
        torch.testing.assert_close(y[:, :3, 2, 0], x[:, :, 4, 0:2].mean(2))
    else:
        assert torch.equal(y[:, :3, 1, 2], x[:, :, 2, 4])


def test_inception_against_its_formula() -> None:
    torch.manual_seed(0)
    module = Inception(6, Widths(2, 3, 4, 5, 6, 7)).eval()
    x = torch.randn(2, 6, 7, 7)
    weights = iter([m.weight for m in module.modules() if isinstance(m, nn.Conv2d)])

    def layer(z: Tensor) -> Tensor:
        weight = next(weights)  # untrained statistics: normalisation is a division by sqrt(1 + eps)
        return torch.relu(F.conv2d(z, weight, padding=weight.shape[-1] // 2)) / math.sqrt(1 + 1e-5)

    branches = [layer(x), layer(layer(x)), layer(layer(layer(x))), layer(F.max_pool2d(x, 3, 1, 1))]
    torch.testing.assert_close(module(x), torch.cat(branches, 1))
    assert [b.shape[1] for b in branches] == [2, 4, 6, 7]


def test_dropout_of_googlenet_is_off_in_evaluation() -> None:
    model = create_model("googlenet").eval()
    x = torch.randn(1, 3, 8, 8)
    assert model.dropout.p == 0.4
    assert torch.equal(model(x), model(x))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: baselines.ResNet(8),
    "wrn": lambda: baselines.WideResNet(10, 2),
    "resnext": lambda: baselines.ResNeXt(11, 2, 8),
    "pyramidnet": lambda: baselines.PyramidNet(8, 7),
    "densenet": lambda: baselines.DenseNet(10, 4, bottleneck=True, compression=0.5),
}


@pytest.mark.parametrize("family", SMALL)
def test_traced_without_a_graph_break(family: str) -> None:
    model = SMALL[family]().eval()
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: baselines.ResNet(100), "6n \\+ 2 .* got 100"),
        (lambda: baselines.ResNet(20, shortcut="pool"), "'pad', 'projection', got 'pool'"),
        (lambda: baselines.WideResNet(4, 1), "6n \\+ 4 with n >= 1, got 4"),
        (lambda: baselines.DenseNet(40, 12, compression=0), "compression must be in .* got 0"),
        (lambda: baselines.MobileNet(num_classes=-1), "num_classes must be at least 1, got -1"),
        (lambda: baselines.DenseNet(7, 4)(torch.zeros(1, 3, 3, 32)), "at least 4×4 pixels, got 3×32"),
        (lambda: baselines.ResNet(8)(torch.zeros(1, 1, 8, 8)), "ResNet expects 3 channels, got 1"),
    ],
)
def test_errors_name_the_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# The same weights in pytorchcv


def mobilenet_for_cifar(**kwargs: int) -> nn.Module:
    """pytorchcv has the ImageNet network only; its stem halves the size, ours does not."""
    model = importlib.import_module("pytorchcv.models.mobilenet").mobilenet_w1(**kwargs)
    model.features.init_block.conv.stride = (1, 1)
    return model


def theirs(module: str, build: str, **settings: object) -> Callable[..., nn.Module]:
    def make(**kwargs: int) -> nn.Module:
        return getattr(importlib.import_module(f"pytorchcv.models.{module}"), build)(**settings, **kwargs)

    return make


# name: (overrides of ours, theirs). pytorchcv projects the shortcuts of ResNet, and always halves the channels of a
# DenseNet between blocks and gives its stem twice the growth rate; those settings are taken for the comparison.
REFERENCES: dict[str, tuple[dict[str, object], Callable[..., nn.Module]]] = {
    "resnet_110": ({"shortcut": "projection"}, theirs("resnet_cifar", "resnet110_cifar100")),
    **{f"wrn_40_{k}": ({}, theirs("wrn_cifar", "get_wrn_cifar", blocks=40, width_factor=k)) for k in (1, 2, 4)},
    "mobilenet": ({}, mobilenet_for_cifar),
    "resnext_29_1x64d": (
        {},
        theirs("resnext_cifar", "get_resnext_cifar", blocks=29, cardinality=1, bottleneck_width=64),
    ),
    "pyramidnet_110_48": ({}, theirs("pyramidnet_cifar", "pyramidnet110_a48_cifar100")),
    "pyramidnet_110_84": ({}, theirs("pyramidnet_cifar", "pyramidnet110_a84_cifar100")),
    "densenet_40_12": (
        {"compression": 0.5, "stem": 24},
        theirs("densenet_cifar", "densenet40_k12_cifar100"),
    ),
    "densenet_100_12": (
        {"compression": 0.5, "stem": 24},
        theirs("densenet_cifar", "densenet100_k12_cifar100"),
    ),
    "densenet_bc_40_18": (
        {},
        theirs("densenet_cifar", "get_densenet_cifar", blocks=40, growth_rate=18, bottleneck=True),
    ),
    "densenet_bc_100_12": ({}, theirs("densenet_cifar", "densenet100_k12_bc_cifar100")),
}


def geometry(module: nn.Module) -> tuple[object, ...]:
    """What must agree for two layers to be the same function of the same weights."""
    if isinstance(module, nn.Conv2d):
        shape = (module.in_channels, module.out_channels, module.kernel_size)
        return ("conv", *shape, module.stride, module.padding, module.groups, module.bias is None)
    if isinstance(module, nn.BatchNorm2d):
        return ("norm", module.num_features, module.eps, module.momentum)
    assert isinstance(module, nn.Linear)
    return ("linear", module.in_features, module.out_features)


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]


def randomise(model: nn.Module) -> None:
    """Normalisation that is not the identity, so that a layer out of place shows."""
    for module in layers(model):
        if isinstance(module, nn.BatchNorm2d):
            for scale in (module.weight.data, module.running_var):
                scale.uniform_(0.7, 1.3)
            for shift in (module.bias.data, module.running_mean):
                shift.normal_(0, 0.2)


def copy_weights(ours: nn.Module, reference: nn.Module) -> None:
    """Layer by layer in order, each pair of the same kind and geometry; nothing may be left over."""
    pairs = list(zip(layers(ours), layers(reference), strict=True))
    for mine, other in pairs:
        assert geometry(mine) == geometry(other)
        other.load_state_dict(mine.state_dict())
    assert sum(count(mine) for mine, _ in pairs) == count(ours) == count(reference)


@pytest.mark.parametrize("name", REFERENCES)
def test_same_outputs_as_pytorchcv(name: str) -> None:
    pytest.importorskip("pytorchcv", reason="pytorchcv is not installed (pip install --no-deps pytorchcv)")
    overrides, make = REFERENCES[name]
    torch.manual_seed(0)
    ours = create_model(name, num_classes=100, **overrides)
    randomise(ours)
    reference = make(num_classes=100)
    reference.features.final_pool = nn.AdaptiveAvgPool2d(1)  # theirs is fixed to 32×32 pictures
    copy_weights(ours, reference)
    x = torch.randn(2, 3, 16, 16)
    for training in (False, True):
        ours.train(training)
        reference.train(training)
        with torch.no_grad():
            mine, other = ours(x), reference(x)
        assert other.std() > 1e-3  # alike because they compute the same, not because they vanish
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)
    for mine_layer, other_layer in zip(layers(ours), layers(reference), strict=True):
        if isinstance(mine_layer, nn.BatchNorm2d):
            torch.testing.assert_close(mine_layer.running_mean, other_layer.running_mean)
