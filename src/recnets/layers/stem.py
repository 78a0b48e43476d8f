"""What a RecNet begins with: a convolution of the picture (the architecture table of Section 2.2)."""

from __future__ import annotations

from torch import Tensor, nn

from recnets.layers.crc import check_dtype
from recnets.layers.norm import norm_of
from recnets.layers.recurrent import hooked
from recnets.ops import dispatch
from recnets.ops.dispatch import Following


class Stem(nn.Module):
    """3×3 convolution, BN, ReLU; (N, in_channels, H, W) -> (N, c_out, H, W)."""

    def __init__(self, in_channels: int, c_out: int, *, bias: bool = False, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.conv = nn.Conv2d(in_channels, c_out, kernel_size=3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(c_out)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor, following: Following | None = None) -> Tensor:
        conv = self.conv
        if type(conv) is nn.Conv2d and self.backend != "triton":  # another module may have taken its place
            check_dtype(x, conv.weight, "the stem")
        norm = norm_of(self.norm)
        if not _same_3x3(conv) or hooked(conv):
            return dispatch.norm_relu(conv(x), norm, backend=self.backend, following=following)
        return dispatch.stem(x, conv.weight, conv.bias, norm, backend=self.backend, following=following)


def _same_3x3(conv: nn.Module) -> bool:
    """Is it a 3×3 convolution that keeps the size, as the stem has at first?"""
    if type(conv) is not nn.Conv2d:
        return False
    settings = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return settings == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")
