"""Wide residual networks (Zagoruyko and Komodakis, Wide Residual Networks, 2016)."""

from __future__ import annotations

from typing import Any

from torch import nn

from recnets.models.baselines.common import Baseline, Residual, bn_relu, conv, units, units_per_stage
from recnets.models.registry import register_model


def wide_unit(c_in: int, c_out: int, stride: int) -> Residual:
    """BN-ReLU-conv twice, no dropout; where the width changes, the shortcut shares the first activation."""
    rest = [conv(c_in, c_out, 3, stride), bn_relu(c_out), conv(c_out, c_out)]
    if c_in == c_out:
        return Residual(nn.Sequential(bn_relu(c_in), *rest))
    return Residual(nn.Sequential(*rest), conv(c_in, c_out, 1, stride), before=bn_relu(c_in))


class WideResNet(Baseline):
    """6n + 4 layers: pre-activation units, three stages of n with 16k, 32k and 64k channels."""

    def __init__(self, depth: int, k: int, *, num_classes: int = 10, in_channels: int = 3) -> None:
        n = units_per_stage(depth, layers=2, extra=4, what="a wide ResNet")
        layers: list[nn.Module] = [conv(in_channels, 16)]
        layers += [wide_unit(*unit) for unit in units(16, [[16 * k] * n, [32 * k] * n, [64 * k] * n])]
        layers.append(bn_relu(64 * k))
        super().__init__(nn.Sequential(*layers), 64 * k, num_classes=num_classes, in_channels=in_channels)


@register_model(
    title="WRN-40-1",
    family="wrn",
    paper_params="0.6M",
    note="569,780 parameters with 100 classes: agrees with Table 3 and with its own paper (0.6M), whose accuracy "
    "(30.89 % error) Table 3 quotes.",
)
def wrn_40_1(**kwargs: Any) -> nn.Module:
    return WideResNet(40, 1, **kwargs)


@register_model(
    title="WRN-40-2",
    family="wrn",
    paper_params="2.2M",
    note="2,255,156 parameters with 100 classes, 2,243,546 with 10: agrees with Table 3 and with its own paper "
    "(2.2M, counted with 10 classes), whose accuracy (26.04 % error) Table 3 quotes.",
)
def wrn_40_2(**kwargs: Any) -> nn.Module:
    return WideResNet(40, 2, **kwargs)


@register_model(
    title="WRN-40-4",
    family="wrn",
    paper_params="8.9M",
    note="8,972,340 parameters with 100 classes, 8,949,210 with 10: agrees with Table 3 and with its own paper "
    "(8.9M, counted with 10 classes), whose accuracy (22.89 % error) Table 3 quotes.",
)
def wrn_40_4(**kwargs: Any) -> nn.Module:
    return WideResNet(40, 4, **kwargs)
