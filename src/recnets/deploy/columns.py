"""A Recurrent module as matrix products: the neighbourhoods of all pixels in rows, times [W_x, W_h].

On the small maps of late stages a general matrix product is faster than a convolution, for which the library lays the
weights out anew at every call, and the copy that gathers the neighbourhoods is small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.layers import Recurrent

# Pictures are taken together up to this many pixels: the gathered rows should stay in the processor's cache.
PIXELS = 1024


class ColumnRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "stream", every step but the first a product of gathered neighbourhoods."""

    def __init__(self, module: Recurrent, scale: str) -> None:
        super().__init__(module, "stream", scale)
        if not self.possible(module):
            raise ValueError(f"only kernels of one size with padding_mode='zeros' can be gathered, got {module.crc!r}")
        self.size = module.crc.weight_h.shape[-1]
        # (k·k·(s_in + s_out), s_out), in the order in which a neighbourhood is gathered
        self.weights = [(w.permute(2, 3, 1, 0).reshape(-1, self.s_out).contiguous(),) for (w,) in self.weights]

    @staticmethod
    def possible(module: Recurrent) -> bool:
        crc = module.crc
        return crc.weight_x.shape[-1] == crc.weight_h.shape[-1] and crc.padding_mode == "zeros"

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        some = max(1, PIXELS // (height * width))
        x = channels_last(x)
        if n > some:
            return channels_last(torch.cat([self._some(part) for part in x.split(some)]))
        return self._some(x)

    def _some(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        k, c, r = self.size, self.s_in + self.s_out, self.size // 2
        padded = x.new_zeros(n, height + 2 * r, width + 2 * r, c)
        inner = padded.narrow(1, r, height).narrow(2, r, width)
        place_x, place_h = inner.split([self.s_in, self.s_out], dim=3)
        image, line, pixel, _ = padded.stride()
        windows = padded.as_strided((n, height, width, k, k * c), (image, line, pixel, line, 1))
        gathered = torch.empty_like(windows, memory_format=torch.contiguous_format)
        rows = gathered.view(n * height * width, k * k * c)
        segments = x.permute(0, 2, 3, 1).split(self.s_in, dim=3)
        h = self._step(0, x[:, : self.s_in], None).permute(0, 2, 3, 1)
        z = h.reshape(-1, self.s_out)  # a view: h is in channels-last order
        states = z.view(n, height, width, self.s_out)
        total = torch.addmm(self.start, z, self.matrices[0])
        for i in range(1, self.d):
            place_x.copy_(segments[i])
            place_h.copy_(states)
            gathered.copy_(windows)
            if self.folded:
                torch.addmm(self.shifts[i], rows, self.weights[i - 1][0], out=z)
            else:
                torch.mm(rows, self.weights[0][0], out=z)
                torch.addcmul(self.shifts[i].flatten(), z, self.scales[i].flatten(), out=z)
            z.relu_()
            total.addmm_(z, self.matrices[i])
        return self.expand(total.relu_().view(n, height, width, -1).permute(0, 3, 1, 2))
