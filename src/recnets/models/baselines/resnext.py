"""ResNeXt for CIFAR (Xie et al., Aggregated Residual Transformations, 2017, section 5.3)."""

from __future__ import annotations

from typing import Any

from torch import nn

from recnets.models.baselines.common import Baseline, Residual, conv_bn, units, units_per_stage
from recnets.models.registry import register_model


class ResNeXt(Baseline):
    """9n + 2 layers: bottleneck units with a 3x3 convolution of `cardinality` groups, `width` channels a group.

    `width` is that of the first stage and doubles with each further one; the outputs have 256, 512 and 1024
    channels whatever the width. Shortcuts are projections where the width changes (option B).
    """

    def __init__(
        self, depth: int, cardinality: int, width: int, *, num_classes: int = 10, in_channels: int = 3
    ) -> None:
        n = units_per_stage(depth, layers=3, extra=2, what="a ResNeXt")
        layers: list[nn.Module] = [conv_bn(in_channels, 64)]
        for c_in, c_out, stride in units(64, [[256] * n, [512] * n, [1024] * n]):
            inner = cardinality * (width * c_out // 256)
            body = nn.Sequential(
                conv_bn(c_in, inner, 1),
                conv_bn(inner, inner, 3, stride, cardinality),
                conv_bn(inner, c_out, 1, relu=False),
            )
            skip = conv_bn(c_in, c_out, 1, stride, relu=False) if c_in != c_out else None
            layers.append(Residual(body, skip, after=nn.ReLU(inplace=True)))
        super().__init__(nn.Sequential(*layers), 1024, num_classes=num_classes, in_channels=in_channels)


@register_model(
    title="ResNeXt-29, 1x64d",
    family="resnext",
    paper_params="4.5M",
    note="5,006,500 parameters with 100 classes, 4,914,250 with 10; Table 3's 4.5M is too low. The count follows the "
    "template of its own paper, and gives that paper's 34.4M and 68.1M for 8x64d and 16x64d (34,426,698 and "
    "68,155,210); it prints no figure for 1x64d. 4.5M would need a width of 59 (4,509,855); zero-padded shortcuts "
    "would leave 4,331,172.",
)
def resnext_29_1x64d(**kwargs: Any) -> nn.Module:
    return ResNeXt(29, 1, 64, **kwargs)
