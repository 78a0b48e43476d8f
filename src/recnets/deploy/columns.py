"""A Recurrent module as matrix products: the neighbourhoods of all pixels in rows, times [W_x, W_h].

A picture at a time, a general matrix product is faster than a convolution, of which the library prepares each call
anew, and the copy that gathers the neighbourhoods is small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.layers import Recurrent

# Pictures are taken together up to this many pixels: the gathered rows should stay in the processor's cache.
PIXELS = 1024


class ColumnRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "stream", every step but the first as products of gathered neighbourhoods.

    With `mode` "columns" a pixel's k×k neighbours are gathered, for one product. With "rows" only the k in its line
    are, a k-th of the copy: z = Σ_j g_j·W_j over the k lines of the kernel, where the g_j are one gathered map, moved
    by j lines.
    """

    def __init__(self, module: Recurrent, mode: str, scale: str) -> None:
        super().__init__(module, "stream", scale)
        if not self.possible(module):
            raise ValueError(f"only kernels of one size with padding_mode='zeros' can be gathered, got {module.crc!r}")
        self.size = k = module.crc.weight_h.shape[-1]
        self.lines = k if mode == "columns" else 1
        # of each step (or once): k / lines matrices, (lines·k·(s_in + s_out), s_out), in the order of gathering
        self.weights = [self._matrices(w) for (w,) in self.weights]
        self.scales, self.shifts = ([v.flatten() for v in vectors] for vectors in (self.scales, self.shifts))

    def _matrices(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.permute(2, 3, 1, 0).reshape(self.size // self.lines, -1, self.s_out).contiguous().unbind(0)

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
        # Gathered lines below a picture's last serve its last pixels; as pixels of their own they are not looked at.
        tall = height + self.size - self.lines
        total = x.new_empty(n * tall * width, self.start.shape[0])
        with torch.inference_mode():  # a good part of the work otherwise is keeping books for gradients
            self._sum_into(total, x, tall)
        y = total.view(n, tall, width, -1).narrow(1, 0, height)
        return self.expand(channels_last(y.permute(0, 3, 1, 2)))

    def _sum_into(self, total: Tensor, x: Tensor, tall: int) -> None:
        """relu(Σ_i h_i·A_i + start) in `total`, (N·tall·W, c_out)."""
        n, _, height, width = x.shape
        k, c, r, lines = self.size, self.s_in + self.s_out, self.size // 2, self.lines
        padded = x.new_zeros(n, height + 2 * r, width + 2 * r, c)
        inner = padded.narrow(1, r, height).narrow(2, r, width)
        place_x, place_h = inner.split([self.s_in, self.s_out], dim=3)
        image, line, pixel, _ = padded.stride()
        windows = padded.as_strided((n, tall, width, lines, k * c), (image, line, pixel, line, 1))
        gathered = torch.empty_like(windows, memory_format=torch.contiguous_format)
        rows = gathered.view(n * tall * width, lines * k * c)
        count = len(rows) - (k - lines) * width
        moved = [rows.narrow(0, j * width, count) for j in range(k // lines)]
        h = x.new_zeros(len(rows), self.s_out)
        states, z = h.view(n, tall, width, self.s_out).narrow(1, 0, height), h.narrow(0, 0, count)
        segments = x.permute(0, 2, 3, 1).split(self.s_in, dim=3)
        states.copy_(self._first(x[:, : self.s_in]).permute(0, 2, 3, 1))
        torch.addmm(self.start, h, self.matrices[0], out=total)
        for i in range(1, self.d):
            place_x.copy_(segments[i])
            place_h.copy_(states)
            gathered.copy_(windows)
            weights = self.weights[i - 1 if self.folded else 0]
            if self.folded:
                torch.addmm(self.shifts[i], moved[0], weights[0], out=z)
            else:
                torch.mm(moved[0], weights[0], out=z)
            for g_j, w_j in zip(moved[1:], weights[1:], strict=True):
                z.addmm_(g_j, w_j)
            if not self.folded:
                torch.addcmul(self.shifts[i], z, self.scales[i], out=z)
            z.relu_()
            total.addmm_(h, self.matrices[i])
        total.relu_()

    def _first(self, x_0: Tensor) -> Tensor:
        """h_0, (N, s_out, H, W): there is no state to gather yet."""
        bias = self.shifts[0] if self.folded else None
        z = torch.conv2d(channels_last(x_0), self.first, bias, padding=self.size // 2)
        if not self.folded:
            z = torch.addcmul(self.shifts[0][:, None, None], z, self.scales[0][:, None, None])
        return z.relu_()
