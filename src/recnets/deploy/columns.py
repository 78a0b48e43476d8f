"""A Recurrent module as matrix products: the neighbourhoods of all pixels in rows, times [W_x, W_h].

A picture at a time, a general matrix product is faster than a convolution, of which the library prepares each call
anew, and the copy that gathers the neighbourhoods is small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.layers import Recurrent

# Pictures are taken together up to this many pixels: the gathered rows should stay in the processor's cache.
PIXELS = 1024
# A thread takes at least this many rows of a product.
SHARE = 32


def shares(rows: int, like: Tensor) -> int:
    """In how many equal parts a product of this many rows is best written: one a thread, as a batch of products.

    Threads that share one small product wait for each other much of the time.
    """
    threads = torch.get_num_threads() if like.device.type == "cpu" else 1
    return math.gcd(rows, threads) if rows >= SHARE * threads else 1


class ColumnRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "stream", every step but the first as products of gathered neighbourhoods.

    With `mode` "columns" a pixel's k×k neighbours are gathered, for one product. With "rows" only the k in its line
    are, a k-th of the copy: z = Σ_j g_j·W_j over the k lines of the kernel, where the g_j are one gathered map, moved
    by j lines. The weights are there once, and a step's BN scales its result: a product that starts from a vector
    of shifts takes longer.
    """

    def __init__(self, module: Recurrent, mode: str) -> None:
        super().__init__(module, "stream", "shared")
        if not self.possible(module):
            raise ValueError(f"only d > 1 with kernels of one size, zero-padded, can be gathered, got {module.crc!r}")
        self.size = k = module.crc.weight_h.shape[-1]
        self.lines = k if mode == "columns" else 1
        # k / lines matrices, (lines·k·(s_in + s_out), s_out), in the order of gathering
        self.weights = [self._matrices(w) for (w,) in self.weights]
        self.scales, self.shifts = ([v.flatten() for v in vectors] for vectors in (self.scales, self.shifts))

    def _matrices(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.permute(2, 3, 1, 0).reshape(self.size // self.lines, -1, self.s_out).contiguous().unbind(0)

    @staticmethod
    def possible(module: Recurrent) -> bool:
        crc = module.crc
        return crc.d > 1 and crc.weight_x.shape[-1] == crc.weight_h.shape[-1] and crc.padding_mode == "zeros"

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
        parts = shares(count, x)
        moved = [rows.narrow(0, j * width, count).view(parts, -1, lines * k * c) for j in range(k // lines)]
        # A row's middle is the pixel itself.
        h = moved[r // lines].narrow(2, (lines * k // 2) * c + self.s_in, self.s_out)
        z = x.new_empty(len(rows), self.s_out)
        states = z.view(n, tall, width, self.s_out).narrow(1, 0, height)
        z_parts, sums = (t.narrow(0, 0, count).view(parts, -1, t.shape[1]) for t in (z, total))
        matrices = [a.expand(parts, -1, -1) for a in self.matrices]
        weights = [w.expand(parts, -1, -1) for w in self.weights[0]]
        segments = x.permute(0, 2, 3, 1).split(self.s_in, dim=3)
        place_h.copy_(self._first(x[:, : self.s_in]).permute(0, 2, 3, 1))
        for i in range(1, self.d):
            place_x.copy_(segments[i])
            gathered.copy_(windows)
            sums.baddbmm_(h, matrices[i - 1], beta=min(1, i - 1))
            torch.bmm(moved[0], weights[0], out=z_parts)
            for g_j, w_j in zip(moved[1:], weights[1:], strict=True):
                z_parts.baddbmm_(g_j, w_j)
            torch.addcmul(self.shifts[i], states, self.scales[i], out=states)
            if i + 1 < self.d:
                torch.clamp_min(states, 0, out=place_h)
        sums.baddbmm_(z_parts.relu_(), matrices[-1])
        total.add_(self.start).relu_()

    def _first(self, x_0: Tensor) -> Tensor:
        """h_0, (N, s_out, H, W): there is no state to gather yet."""
        z = torch.conv2d(channels_last(x_0), self.first, None, padding=self.size // 2)
        return torch.addcmul(self.shifts[0][:, None, None], z, self.scales[0][:, None, None]).relu_()
