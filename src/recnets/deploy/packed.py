"""A Recurrent module as convolutions whose weights lie in oneDNN's own order, BN and ReLU inside the call.

`torch.conv2d` brings the weights into that order anew at every call, and takes a slower way on small maps. These are
the operators that `torch.compile` calls in a frozen graph; they are there without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.layers import Recurrent


class PackedRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "stream", every step but the first one call of oneDNN and one product.

    Weights are packed at the first run with pictures of a size and kept. On another device, in another type or while
    compiling it runs as its parent does.
    """

    def __init__(self, module: Recurrent, scale: str) -> None:
        super().__init__(module, "stream", "shared")
        if not self.possible(module):
            raise ValueError(f"oneDNN takes kernels of one size with padding_mode='zeros', got {module.crc!r}")
        self.pack_folded = scale == "folded"
        self.packed: dict[torch.Size, list[Tensor]] = {}

    @staticmethod
    def possible(module: Recurrent) -> bool:
        crc = module.crc
        same = crc.weight_x.shape[-1] == crc.weight_h.shape[-1] and crc.padding_mode == "zeros"
        known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
        return bool(same and known and crc.weight_x.dtype == torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles pack their weights themselves: packed tensors can do neither."""
        return {**super().__getstate__(), "packed": {}}  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> FastRecurrent:
        self.packed = {}
        return super()._apply(*args, **kwargs)

    def _pack(self, shape: torch.Size) -> list[Tensor]:
        """The weights of every step but the first (or once) for [x_i, h_{i-1}] of a shape."""
        if shape not in self.packed:
            ((weight,),) = self.weights
            scales = self.scales[1:] if self.pack_folded else [torch.ones_like(self.scales[0])]
            radius = weight.shape[-1] // 2
            self.packed[shape] = [
                torch.ops.mkldnn._reorder_convolution_weight(
                    (weight * scale[:, None]).contiguous(), [radius] * 2, [1, 1], [1, 1], 1, list(shape)
                )
                for scale in scales
            ]
        return self.packed[shape]

    def forward(self, x: Tensor) -> Tensor:
        plain = x.dtype == self.start.dtype == torch.float32 and x.device.type == self.start.device.type == "cpu"
        if not plain or self.d == 1 or torch.compiler.is_compiling() or not torch.backends.mkldnn.enabled:
            return super().forward(x)
        n, _, height, width = x.shape
        x = channels_last(x)
        total = x.new_empty(n * height * width, self.start.shape[0])
        with torch.inference_mode():  # a good part of the work otherwise is keeping books for gradients
            self._sum_into(total, x)
        return self.expand(total.view(n, height, width, -1).permute(0, 3, 1, 2))

    def _sum_into(self, total: Tensor, x: Tensor) -> None:
        """relu(Σ_i h_i·A_i + start) in `total`, (N·H·W, c_out)."""
        n, _, height, width = x.shape
        convolve, one = torch.ops.mkldnn._convolution_pointwise, [1, 1]
        packed = self._pack(torch.Size((n, self.s_in + self.s_out, height, width)))
        radius = [self.first.shape[-1] // 2] * 2
        x_0, *segments = x.split(self.s_in, dim=1)
        h = self._step(0, x_0, None)
        torch.addmm(self.start, h.permute(0, 2, 3, 1).reshape(-1, self.s_out), self.matrices[0], out=total)
        for i, x_i in enumerate(segments, 1):
            xh = torch.cat([x_i, h], dim=1)
            if self.pack_folded:
                h = convolve(xh, packed[i - 1], self.shifts[i].flatten(), radius, one, one, 1, "relu", [], "")
            else:
                z = convolve(xh, packed[0], None, radius, one, one, 1, "none", [], "")
                h = torch.addcmul(self.shifts[i], z, self.scales[i], out=z).relu_()
            total.addmm_(h.permute(0, 2, 3, 1).reshape(-1, self.s_out), self.matrices[i])
        total.relu_()
