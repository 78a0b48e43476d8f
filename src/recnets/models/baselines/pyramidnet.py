"""PyramidNet for CIFAR (Han et al., Deep Pyramidal Residual Networks, 2017)."""

from __future__ import annotations

from typing import Any

from torch import nn

from recnets.models.baselines.common import (
    Baseline,
    PadChannels,
    Residual,
    bn_relu,
    conv,
    conv_bn,
    units,
    units_per_stage,
)
from recnets.models.registry import register_model


def pyramid_widths(alpha: int, count: int) -> list[int]:
    """Channels of each of `count` units: 16 + k·alpha/count to the nearest integer, k = 1 ... count.

    The paper's formula rounds down at every step, and taken literally would never leave 16 where
    alpha < count; its authors' code adds up fractions and rounds each sum to the nearest, and so does this.
    """
    return [16 + (2 * alpha * k + count) // (2 * count) for k in range(1, count + 1)]


def pyramid_unit(c_in: int, c_out: int, stride: int) -> Residual:
    """BN-conv-BN-ReLU-conv-BN with one ReLU, and zeros for the channels that the shortcut lacks."""
    body = nn.Sequential(
        nn.BatchNorm2d(c_in),
        conv(c_in, c_out, 3, stride),
        bn_relu(c_out),
        conv(c_out, c_out),
        nn.BatchNorm2d(c_out),
    )
    return Residual(body, PadChannels(c_out - c_in, stride, pool=True))


class PyramidNet(Baseline):
    """6n + 2 layers whose width grows by alpha in all, in equal steps from unit to unit."""

    def __init__(self, depth: int, alpha: int, *, num_classes: int = 10, in_channels: int = 3) -> None:
        n = units_per_stage(depth, layers=2, extra=2, what="a PyramidNet of basic units")
        widths = pyramid_widths(alpha, 3 * n)
        layers: list[nn.Module] = [conv_bn(in_channels, 16, relu=False)]
        layers += [pyramid_unit(*unit) for unit in units(16, [widths[i : i + n] for i in range(0, 3 * n, n)])]
        layers.append(bn_relu(widths[-1]))
        super().__init__(nn.Sequential(*layers), widths[-1], num_classes=num_classes, in_channels=in_channels)


@register_model(
    title="PyramidNet-110 (alpha 48)",
    family="pyramidnet",
    paper_params="1.7M",
    note="1,778,556 parameters with 100 classes, which rounds to 1.8M; Table 3 and its own paper print 1.7M. The "
    "count here is right for its authors' code, which rounds each width to the nearest; rounding down, as "
    "that paper's equation does, would give 1,745,580.",
)
def pyramidnet_110_48(**kwargs: Any) -> nn.Module:
    return PyramidNet(110, 48, **kwargs)


@register_model(
    title="PyramidNet-110 (alpha 84)",
    family="pyramidnet",
    paper_params="3.8M",
    note="3,913,536 parameters with 100 classes (3.9M); Table 3 and its own paper print 3.8M. The count here is "
    "right for its authors' code, which rounds each width to the nearest; rounding down, as that paper's "
    "equation does, would give 3,864,144.",
)
def pyramidnet_110_84(**kwargs: Any) -> nn.Module:
    return PyramidNet(110, 84, **kwargs)
