"""What the baselines share: the classifier around a stack of feature maps, their blocks and their initialisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recnets.layers.crc import check_input
from recnets.utils import positive_int


class Baseline(nn.Module):
    """Feature maps, global average pooling, (dropout,) one linear layer.

    Subclasses build their maps and hand them to `__init__`. Global pooling makes the network independent of the
    picture's size, down to `min_size` pixels a side. No classes (0) means no classifier: forward then gives the
    pooled features.
    """

    min_size = 1  # below it a pooling layer would have nothing left to pool

    def __init__(
        self,
        features: nn.Sequential,
        num_features: int,
        *,
        num_classes: int,
        in_channels: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_channels = positive_int(in_channels, "in_channels")
        self.num_features = num_features
        self.features = features
        self.dropout = nn.Dropout(dropout)
        for module in features.modules():
            if isinstance(module, nn.Conv2d):
                self.init_conv(module)
        self.reset_classifier(num_classes)

    def init_conv(self, module: nn.Conv2d) -> None:
        """He normal over the fan-out, as the Torch code of the residual and dense networks' authors has it."""
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def init_linear(self, module: nn.Linear) -> None:
        """PyTorch's own weights (the same as Torch 7's) and no bias to begin with."""
        nn.init.zeros_(module.bias)

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh linear layer for `num_classes` classes (0: none), on the device and of the type of the maps."""
        self.num_classes = num_classes if num_classes == 0 else positive_int(num_classes, "num_classes")
        self.classifier: nn.Module = nn.Identity()
        if num_classes:
            like = next(self.features.parameters())
            self.classifier = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            self.init_linear(self.classifier)

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to the last feature maps, (N, num_features, h, w)."""
        check_input(x, self.in_channels, type(self).__name__)
        if min(x.shape[2:]) < self.min_size:
            raise ValueError(
                f"{type(self).__name__} needs pictures of at least {self.min_size}×{self.min_size} pixels, "
                f"got {x.shape[2]}×{x.shape[3]}"
            )
        return self.features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Global average pooling, then dropout and the classifier unless `pre_logits`."""
        x = x.mean(dim=(2, 3))
        return x if pre_logits else self.classifier(self.dropout(x))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to logits (N, num_classes)."""
        return self.forward_head(self.forward_features(x))


class Residual(nn.Module):
    """after(body(z) + shortcut(z)) with z = before(x): every residual unit, pre- or post-activation."""

    def __init__(
        self,
        body: nn.Module,
        shortcut: nn.Module | None = None,
        *,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.after = after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(self.body(x) + self.shortcut(x))


class PadChannels(nn.Module):
    """Parameter-free shortcut: `extra` channels of zeros behind those of x, halved in size when stride is 2.

    `pool` halves by the mean of 2x2 pixels, otherwise by every second pixel.
    """

    def __init__(self, extra: int, stride: int = 1, *, pool: bool = False) -> None:
        super().__init__()
        self.extra, self.stride, self.pool = extra, stride, pool

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1 and self.pool:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)  # an odd side rounds up, as in the strided convolution
        elif self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))

    def extra_repr(self) -> str:
        return f"extra={self.extra}, stride={self.stride}, pool={self.pool}"


def conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A 'same' convolution without bias: normalisation follows it."""
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def conv_bn(
    c_in: int, c_out: int, kernel: int = 3, stride: int = 1, groups: int = 1, *, relu: bool = True
) -> nn.Sequential:
    """Convolution, normalisation (, ReLU): the post-activation order."""
    layers: list[nn.Module] = [conv(c_in, c_out, kernel, stride, groups), nn.BatchNorm2d(c_out)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


def bn_relu(channels: int) -> nn.Sequential:
    """Normalisation and ReLU: what comes before a convolution in the pre-activation order."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def units(start: int, stages: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """(channels in, channels out, stride) of every unit; the first of each stage but the first halves the size."""
    c_in = start
    for i, widths in enumerate(stages):
        for j, c_out in enumerate(widths):
            yield c_in, c_out, 2 if i > 0 and j == 0 else 1
            c_in = c_out


def units_per_stage(depth: int, *, layers: int, extra: int, what: str) -> int:
    """n of depth = 3·layers·n + extra: three stages of n units of `layers` layers each."""
    n, rest = divmod(depth - extra, 3 * layers)
    if rest or n < 1:
        raise ValueError(f"the depth of {what} must be {3 * layers}n + {extra} with n >= 1, got {depth}")
    return n


def concat(x: Tensor, *more: Tensor) -> Tensor:
    """Maps side by side along the channels."""
    return torch.cat((x, *more), dim=1)
