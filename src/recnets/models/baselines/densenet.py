"""DenseNet and DenseNet-BC for CIFAR (Huang et al., Densely Connected Convolutional Networks, 2017)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recnets.models.baselines.common import Baseline, bn_relu, concat, conv, units_per_stage
from recnets.models.registry import register_model


class DenseLayer(nn.Module):
    """(N, C, H, W) to (N, C + growth, H, W): the input, and behind it `growth` maps computed from all of it."""

    def __init__(self, c_in: int, growth: int, *, bottleneck: bool) -> None:
        super().__init__()
        inner = 4 * growth if bottleneck else c_in
        squeeze = [bn_relu(c_in), conv(c_in, inner, 1)] if bottleneck else []
        self.body = nn.Sequential(*squeeze, bn_relu(inner), conv(inner, growth))

    def forward(self, x: Tensor) -> Tensor:
        return concat(x, self.body(x))


class DenseNet(Baseline):
    """Three dense blocks of equal length, halved in size by transitions in between.

    `compression` is the share of channels that a transition keeps. The stem has `stem` channels: 16, or twice
    the growth rate with bottlenecks, when None.
    """

    min_size = 4

    def __init__(
        self,
        depth: int,
        growth: int,
        *,
        bottleneck: bool = False,
        compression: float = 1.0,
        stem: int | None = None,
        num_classes: int = 10,
        in_channels: int = 3,
    ) -> None:
        n = units_per_stage(depth, layers=2 if bottleneck else 1, extra=4, what="a DenseNet")
        if not 0 < compression <= 1:
            raise ValueError(f"compression must be in (0, 1], got {compression}")
        channels = stem or (2 * growth if bottleneck else 16)
        layers: list[nn.Module] = [conv(in_channels, channels)]
        for block in range(3):
            if block > 0:
                kept = int(channels * compression)
                layers.append(nn.Sequential(bn_relu(channels), conv(channels, kept, 1), nn.AvgPool2d(2)))
                channels = kept
            for _ in range(n):
                layers.append(DenseLayer(channels, growth, bottleneck=bottleneck))
                channels += growth
        layers.append(bn_relu(channels))
        super().__init__(nn.Sequential(*layers), channels, num_classes=num_classes, in_channels=in_channels)


def densenet_bc(depth: int, growth: int, **kwargs: Any) -> DenseNet:
    """Bottlenecks and transitions that keep half of the channels."""
    return DenseNet(depth, growth, **{"bottleneck": True, "compression": 0.5, **kwargs})


@register_model(
    title="DenseNet-40-12",
    family="densenet",
    paper_params="1.0M",
    note="1,060,132 parameters with 100 classes, 1,019,722 with 10: agrees with Table 3 and with its own paper (1.0M, "
    "counted with 10 classes), whose accuracy (24.42 % error) Table 3 quotes.",
)
def densenet_40_12(**kwargs: Any) -> nn.Module:
    return DenseNet(40, 12, **kwargs)


@register_model(
    title="DenseNet-100-12",
    family="densenet",
    paper_params="7.0M",
    note="7,084,852 parameters with 100 classes, 6,979,642 with 10: agrees with Table 3 and with its own paper (7.0M, "
    "counted with 10 classes), whose accuracy (20.20 % error) Table 3 quotes.",
)
def densenet_100_12(**kwargs: Any) -> nn.Module:
    return DenseNet(100, 12, **kwargs)


@register_model(
    title="DenseNet-BC-40-18",
    family="densenet",
    paper_params="0.4M",
    note="408,880 parameters with 100 classes: agrees with Table 3 (0.4M). Its own paper has no such network.",
)
def densenet_bc_40_18(**kwargs: Any) -> nn.Module:
    return densenet_bc(40, 18, **kwargs)


@register_model(
    title="DenseNet-BC-100-12",
    family="densenet",
    paper_params="0.8M",
    note="800,032 parameters with 100 classes: agrees with Table 3 and with its own paper (0.8M), whose accuracy "
    "(22.27 % error) Table 3 quotes.",
)
def densenet_bc_100_12(**kwargs: Any) -> nn.Module:
    return densenet_bc(100, 12, **kwargs)
