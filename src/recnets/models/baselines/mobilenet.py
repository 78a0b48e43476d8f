"""MobileNet (Howard et al., MobileNets, 2017) for small pictures."""

from __future__ import annotations

from typing import Any

from torch import nn

from recnets.models.baselines.common import Baseline, conv_bn, units
from recnets.models.registry import register_model

STAGES = ([64], [128] * 2, [256] * 2, [512] * 6, [1024] * 2)
STD = 0.09  # of the truncated normal in the authors' TensorFlow code; the paper names none


class MobileNet(Baseline):
    """Thirteen depthwise separable convolutions at full width; the stem keeps the size, which then halves four times.

    The ImageNet network halves five times, the first in its stem; without that one a 32x32 picture ends in 2x2
    maps. Parameters do not depend on it.
    """

    def __init__(self, *, num_classes: int = 10, in_channels: int = 3) -> None:
        layers: list[nn.Module] = [conv_bn(in_channels, 32)]
        for c_in, c_out, stride in units(32, STAGES):
            layers += [conv_bn(c_in, c_in, 3, stride, groups=c_in), conv_bn(c_in, c_out, 1)]
        super().__init__(nn.Sequential(*layers), 1024, num_classes=num_classes, in_channels=in_channels)

    def init_conv(self, module: nn.Conv2d) -> None:
        nn.init.trunc_normal_(module.weight, std=STD, a=-2 * STD, b=2 * STD)

    def init_linear(self, module: nn.Linear) -> None:
        nn.init.trunc_normal_(module.weight, std=STD, a=-2 * STD, b=2 * STD)
        nn.init.zeros_(module.bias)


@register_model(
    title="MobileNet",
    family="mobilenet",
    paper_params="3.3M",
    note="3,309,476 parameters with 100 classes: agrees with Table 3 (3.3M). Its own paper's 4.2M is the ImageNet "
    "network with 1000 classes; with 100 the classifier is smaller and nothing else changes. The CIFAR form is the "
    "usual one: full width, a stem that keeps the size.",
)
def mobilenet(**kwargs: Any) -> nn.Module:
    return MobileNet(**kwargs)
