"""GoogLeNet (Szegedy et al., Going Deeper with Convolutions, 2015) for small pictures."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from recnets.models.baselines.common import Baseline, concat, conv_bn
from recnets.models.registry import register_model


class Widths(NamedTuple):
    """One row of the paper's Table 1, in its order."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pool: int

    @property
    def out(self) -> int:
        return self.one + self.three + self.five + self.pool


# Inception 3a-3b, 4a-4e, 5a-5b; the size halves between the groups.
STAGES = (
    (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64)),
    (
        Widths(192, 96, 208, 16, 48, 64),
        Widths(160, 112, 224, 24, 64, 64),
        Widths(128, 128, 256, 24, 64, 64),
        Widths(112, 144, 288, 32, 64, 64),
        Widths(256, 160, 320, 32, 128, 128),
    ),
    (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """1x1, 3x3, 5x5 and pooling side by side; two 3x3 convolutions stand for the 5x5, normalisation follows each."""

    def __init__(self, c_in: int, w: Widths) -> None:
        super().__init__()
        self.one = conv_bn(c_in, w.one, 1)
        self.three = nn.Sequential(conv_bn(c_in, w.reduce_three, 1), conv_bn(w.reduce_three, w.three))
        self.five = nn.Sequential(
            conv_bn(c_in, w.reduce_five, 1), conv_bn(w.reduce_five, w.five), conv_bn(w.five, w.five)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_bn(c_in, w.pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return concat(self.one(x), self.three(x), self.five(x), self.pool(x))


class GoogLeNet(Baseline):
    """One 3x3 convolution of 192 channels for a stem, then the nine inception modules, 32x32 to 8x8.

    No auxiliary classifiers. Dropout of 40 % before the classifier, as in the paper, which names no
    initialisation.
    """

    def __init__(self, *, dropout: float = 0.4, num_classes: int = 10, in_channels: int = 3) -> None:
        channels = 192
        layers: list[nn.Module] = [conv_bn(in_channels, channels)]
        for i, stage in enumerate(STAGES):
            if i > 0:
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            for widths in stage:
                layers.append(Inception(channels, widths))
                channels = widths.out
        features = nn.Sequential(*layers)
        super().__init__(features, channels, num_classes=num_classes, in_channels=in_channels, dropout=dropout)


@register_model(
    title="GoogLeNet",
    family="googlenet",
    paper_params="6.8M",
    note="6,250,596 parameters with 100 classes, not 6.8M. Table 3's figure is the sum of the column of sizes in "
    "GoogLeNet's own Table 1, which is the ImageNet network with 1000 classes. Table 3's accuracy is "
    "what the pytorch-cifar100 repository once gave (22.09 % error) for this CIFAR form: 6.2M, a 192-channel stem, "
    "two 3x3 convolutions for each 5x5. So the accuracy belongs to this network and the size to another.",
)
def googlenet(**kwargs: Any) -> nn.Module:
    return GoogLeNet(**kwargs)
