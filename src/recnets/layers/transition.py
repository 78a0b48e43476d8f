"""The Transition Block: what follows a CRC layer and mixes its segments (Section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recnets.layers.crc import check_input
from recnets.layers.norm import norm_of
from recnets.ops import dispatch
from recnets.ops.dispatch import Following
from recnets.utils import choose, positive_int


class TransitionBlock(nn.Module):
    """TB(c_in, c_out): 1×1 convolution without bias, BN, ReLU; (N, c_in, H, W) -> (N, c_out, H, W).

    Called with `pool=True` it gives the 2×2 maxima of that, which the kernels compute in the same pass; for a CRC layer
    that is `following`, see `dispatch.norm_relu`.
    """

    def __init__(self, c_in: int, c_out: int, *, backend: str = "auto") -> None:
        super().__init__()
        self.backend = choose(backend, dispatch.BACKENDS, "backend")
        self.c_in = positive_int(c_in, "c_in")
        self.c_out = positive_int(c_out, "c_out")
        self.conv = nn.Conv2d(c_in, c_out, kernel_size=1, bias=False)
        # In the order of its use in streaming: the rows of each A_i, (s_out, c_out), one after another.
        self.conv.weight = nn.Parameter(torch.empty(c_in, c_out).t()[:, :, None, None])
        self.norm = nn.BatchNorm2d(c_out)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor, pool: bool = False, following: Following | None = None) -> Tensor:
        check_input(x, self.c_in, f"TransitionBlock({self.c_in}, {self.c_out})", self.conv.weight)
        y = dispatch.pointwise(x, self.conv.weight)
        return dispatch.norm_relu(y, norm_of(self.norm), backend=self.backend, pool=pool, following=following)
