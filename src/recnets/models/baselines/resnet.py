"""ResNet for CIFAR (He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2)."""

from __future__ import annotations

from typing import Any

from torch import nn

from recnets.models.baselines.common import Baseline, PadChannels, Residual, conv_bn, units, units_per_stage
from recnets.models.registry import register_model
from recnets.utils import choose


class ResNet(Baseline):
    """6n + 2 layers: a 3x3 stem and three stages of n basic units with 16, 32 and 64 channels.

    `shortcut` is how a unit that halves the size passes its input on: "pad" (the paper's option A, the one it
    uses on CIFAR: every second pixel, zeros for the new channels) or "projection" (option B: a strided 1x1
    convolution with normalisation).
    """

    def __init__(self, depth: int, *, shortcut: str = "pad", num_classes: int = 10, in_channels: int = 3) -> None:
        n = units_per_stage(depth, layers=2, extra=2, what="a ResNet of basic units")
        choose(shortcut, ("pad", "projection"), "shortcut")

        def skip(c_in: int, c_out: int, stride: int) -> nn.Module | None:
            if c_in == c_out:
                return None
            if shortcut == "pad":
                return PadChannels(c_out - c_in, stride)
            return conv_bn(c_in, c_out, 1, stride, relu=False)

        layers: list[nn.Module] = [conv_bn(in_channels, 16)]
        for c_in, c_out, stride in units(16, [[16] * n, [32] * n, [64] * n]):
            body = nn.Sequential(conv_bn(c_in, c_out, 3, stride), conv_bn(c_out, c_out, relu=False))
            layers.append(Residual(body, skip(c_in, c_out, stride), after=nn.ReLU(inplace=True)))
        super().__init__(nn.Sequential(*layers), 64, num_classes=num_classes, in_channels=in_channels)


@register_model(
    title="ResNet-110",
    family="resnet",
    paper_params="1.7M",
    note="1,733,812 parameters with 100 classes: agrees with Table 3 and with its own paper (1.7M). Zero-padded "
    "shortcuts (option A), as that paper has on CIFAR; projections, as in many ports, would add 2,752. That paper "
    "gives no CIFAR-100 accuracy, so Table 3's 75.73 comes from elsewhere.",
)
def resnet_110(**kwargs: Any) -> nn.Module:
    return ResNet(110, **kwargs)
