"""A Recurrent module as matrix products: the neighbourhoods of all pixels in rows, times [W_x, W_h].

A picture at a time, a general matrix product is faster than a convolution, of which the library prepares each call
anew, and the copy that gathers the neighbourhoods is small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recnets.deploy.fast import channels_last
from recnets.deploy.products import ProductRecurrent, shares
from recnets.layers import Recurrent


class _Space(NamedTuple):
    """The buffers of a module's steps, as the views that a step needs."""

    place_x: Tensor  # (N, H, W, s_in) and
    place_h: Tensor  # (N, H, W, s_out): where x_i and h_{i-1} lie, with zeros around
    windows: Tensor  # the neighbourhoods of all pixels, which overlap
    gathered: Tensor  # the same in memory of their own
    moved: list[Tensor]  # rows of `gathered`, for each line of the kernel that is not gathered
    h: Tensor  # a row's middle, the pixel itself
    z: Tensor  # pre-activations of the rows
    states: Tensor  # (N, H, W, s_out), of z
    sums: Tensor  # of the rows
    looked_at: Tensor  # (N, H, W, c_out), of the sums


def _build(
    n: int, height: int, width: int, s_in: int, s_out: int, c_out: int, k: int, lines: int,
    dtype: torch.dtype, device: torch.device, threads: int = 0,
) -> _Space:  # fmt: skip
    c, r = s_in + s_out, k // 2
    # Gathered lines below a picture's last serve its last pixels; as pixels of their own they are not looked at.
    tall = height + k - lines
    padded = torch.zeros(n, height + 2 * r, width + 2 * r, c, dtype=dtype, device=device)
    place_x, place_h = padded.narrow(1, r, height).narrow(2, r, width).split([s_in, s_out], dim=3)
    image, line, pixel, _ = padded.stride()
    windows = padded.as_strided((n, tall, width, lines, k * c), (image, line, pixel, line, 1))
    gathered = torch.empty_like(windows, memory_format=torch.contiguous_format)
    rows = gathered.view(n * tall * width, lines * k * c)
    count = len(rows) - (k - lines) * width
    parts = shares(count, device)
    moved = [rows.narrow(0, j * width, count).view(parts, -1, lines * k * c) for j in range(k // lines)]
    h = moved[r // lines].narrow(2, (lines * k // 2) * c + s_in, s_out)
    z, total = (torch.empty(len(rows), channels, dtype=dtype, device=device) for channels in (s_out, c_out))
    states, looked_at = (t.view(n, tall, width, -1).narrow(1, 0, height) for t in (z, total))
    z_parts, sums = (t.narrow(0, 0, count).view(parts, -1, t.shape[1]) for t in (z, total))
    return _Space(place_x, place_h, windows, gathered, moved, h, z_parts, states, sums, looked_at)


class ColumnRecurrent(ProductRecurrent):
    """Every step but the first as products of gathered neighbourhoods.

    With `mode` "columns" a pixel's k×k neighbours are gathered, for one product. With "rows" only the k in its line
    are, a k-th of the copy: z = Σ_j g_j·W_j over the k lines of the kernel, where the g_j are one gathered map, moved
    by j lines.
    """

    def __init__(self, module: Recurrent, mode: str) -> None:
        super().__init__(module)
        self.size = k = module.crc.weight_h.shape[-1]
        self.lines = k if mode == "columns" else 1
        # k / lines matrices, (lines·k·(s_in + s_out), s_out), in the order of gathering
        self.weights = [self._lines_of(w) for (w,) in self.weights]

    def _lines_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.permute(2, 3, 1, 0).reshape(self.size // self.lines, -1, self.s_out).contiguous().unbind(0)

    def _sums(self, x: Tensor) -> Tensor:
        space: _Space = self._space(_build, x, self.size, self.lines)
        place_x, place_h, windows, gathered, moved, h, z, states, sums, looked_at = space
        parts = len(sums)
        matrices = self._matrices(parts)
        first, *others = zip(moved, (w.expand(parts, -1, -1) for w in self.weights[0]), strict=True)
        segments = x.permute(0, 2, 3, 1).split(self.s_in, dim=3)
        place_h.copy_(self._first(x[:, : self.s_in]).permute(0, 2, 3, 1))
        for i in range(1, self.d):
            place_x.copy_(segments[i])
            gathered.copy_(windows)
            sums.baddbmm_(h, matrices[i - 1], beta=min(1, i - 1))
            torch.bmm(*first, out=z)
            for g_j, w_j in others:
                z.baddbmm_(g_j, w_j)
            torch.addcmul(self.shifts[i], states, self.scales[i], out=states)
            if i + 1 < self.d:
                torch.clamp_min(states, 0, out=place_h)
        sums.baddbmm_(z.relu_(), matrices[-1])
        return looked_at

    def _first(self, x_0: Tensor) -> Tensor:
        """h_0, (N, s_out, H, W): there is no state to gather yet."""
        z = torch.conv2d(channels_last(x_0), self.first, None, padding=self.size // 2)
        return torch.addcmul(self.shifts[0][:, None, None], z, self.scales[0][:, None, None]).relu_()
