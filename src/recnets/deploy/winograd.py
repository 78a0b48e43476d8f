"""A Recurrent module as products of Winograd's F(4, 3) along the lines of the map: half the multiplications.

Four outputs of a filter of three taps take twelve products, or six of transformed values: y = Aᵀ((G·w) ∘ (Bᵀ·x)). Here
that runs along a line, each of the six products being a matrix product over the channels, and the kernel's three lines
add up (Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, arXiv:1509.09308, Section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from recnets.deploy.products import ProductRecurrent, shares
from recnets.layers import Recurrent

OUTPUTS = 4
INPUTS = OUTPUTS + 2
# The transforms at the points 0, 1, -1, 2, -2 and infinity.
B_T = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
G = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
A_T = (
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


class _Space(NamedTuple):
    """The buffers of a module's steps, as the views that a step needs. Four pixels side by side are a row."""

    place_x: Tensor  # (N, H, W, s_in), where x_i lies, and
    place_h: Tensor  # (4, N, H, fours, s_out), where h_{i-1} does, with zeros around
    beyond: Tensor  # of the pixels of h, those after a line's last
    windows: Tensor  # (6, N, H + 2, fours, s_in + s_out): for every row its six inputs, which overlap
    gathered: Tensor  # the same in memory of their own
    inputs: Tensor  # the same, (6, …)
    transformed: Tensor  # Bᵀ times the inputs, (6, …)
    lines: list[Tensor]  # the same for the three lines of a kernel, (6, rows, s_in + s_out) each
    products: Tensor  # (6, rows, s_out)
    flat_products: Tensor  # (6, …)
    outputs: Tensor  # Aᵀ times the products, (4, …)
    states: Tensor  # the same, (4, N, H, fours, s_out)
    pixels: Tensor  # the same, (parts, …, s_out)
    sums: Tensor  # (parts, …, c_out)
    looked_at: Tensor  # (N, H, fours, 4, c_out), of the sums


def _build(
    n: int, height: int, width: int, s_in: int, s_out: int, c_out: int, dtype: torch.dtype, device: torch.device,
    threads: int = 0,
) -> _Space:  # fmt: skip
    channels, tall, fours = s_in + s_out, height + 2, -(-width // OUTPUTS)
    padded = torch.zeros(n, tall, fours * OUTPUTS + 2, channels, dtype=dtype, device=device)
    inner = padded.narrow(1, 1, height).narrow(2, 1, fours * OUTPUTS)
    place_x, place_h = inner.split([s_in, s_out], dim=3)
    beyond = place_h.narrow(2, width, fours * OUTPUTS - width)
    image, line, pixel, _ = padded.stride()
    windows = padded.as_strided((INPUTS, n, tall, fours, channels), (pixel, image, line, OUTPUTS * pixel, 1))
    gathered = torch.empty_like(windows, memory_format=torch.contiguous_format)
    transformed = torch.empty_like(gathered)
    # Two lines after a picture's last are computed with the rest, and not looked at; those of the last picture are
    # left out.
    rows = (n * tall - 2) * fours
    lines = [transformed.view(INPUTS, -1, channels).narrow(1, j * fours, rows) for j in range(3)]
    products, z, total = (
        torch.empty(count, rows, c, dtype=dtype, device=device)
        for count, c in ((INPUTS, s_out), (OUTPUTS, s_out), (OUTPUTS, c_out))
    )
    states, looked_at = (
        t.as_strided((OUTPUTS, n, height, fours, c), (rows * c, tall * fours * c, fours * c, c, 1))
        for t, c in ((z, s_out), (total, c_out))
    )
    parts = shares(OUTPUTS * rows, device)
    return _Space(
        place_x=place_x.narrow(2, 0, width),
        place_h=place_h.unflatten(2, (fours, OUTPUTS)).permute(3, 0, 1, 2, 4),
        beyond=beyond,
        windows=windows,
        gathered=gathered,
        inputs=gathered.view(INPUTS, -1),
        transformed=transformed.view(INPUTS, -1),
        lines=lines,
        products=products,
        flat_products=products.view(INPUTS, -1),
        outputs=z.view(OUTPUTS, -1),
        states=states,
        pixels=z.view(parts, -1, s_out),
        sums=total.view(parts, -1, c_out),
        looked_at=looked_at.permute(1, 2, 3, 0, 4),
    )


class WinogradRecurrent(ProductRecurrent):
    """Every step as products of transformed lines, for 3×3 kernels.

    Like "rows" of `ColumnRecurrent` with six numbers for four pixels in place of twelve. Rounding grows by a small
    factor, which float32 can afford and half precision cannot.
    """

    def __init__(self, module: Recurrent) -> None:
        super().__init__(module)
        ((weight,),) = self.weights
        filters = torch.einsum("ai,ocji->jaco", weight.new_tensor(G, dtype=torch.float64), weight.double())
        # a line of the kernel each: (6, s_in + s_out, s_out)
        self.weights = [filters.to(weight.dtype).contiguous().unbind(0)]
        self.b_t, self.a_t = weight.new_tensor(B_T), weight.new_tensor(A_T)

    @staticmethod
    def possible(module: Recurrent) -> bool:
        """There must be two steps, a BN or ReLU in each, 3×3 kernels in float32 or float64 and zeros around the map."""
        weight = module.crc.weight_h
        exact = weight.dtype in (torch.float32, torch.float64)
        return ProductRecurrent.possible(module) and weight.shape[-1] == 3 and exact

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.b_t, self.a_t = fn(self.b_t), fn(self.a_t)
        return self

    def _computed(self, width: int) -> int:
        return -(-width // OUTPUTS) * OUTPUTS

    def _sums(self, x: Tensor) -> Tensor:
        space: _Space = self._space(_build, x)
        place_x, place_h, beyond, windows, gathered, inputs, transformed, lines = space[:8]
        products, flat_products, outputs, states, pixels, sums, looked_at = space[8:]
        ragged = beyond.numel() > 0
        matrices = self._matrices(len(sums))
        first, *others = zip(lines, *self.weights, strict=True)
        place_h.zero_()
        for i, x_i in enumerate(x.permute(0, 2, 3, 1).split(self.s_in, dim=3)):
            place_x.copy_(x_i)
            gathered.copy_(windows)
            torch.mm(self.b_t, inputs, out=transformed)
            torch.bmm(*first, out=products)
            for values, weight in others:
                products.baddbmm_(values, weight)
            torch.mm(self.a_t, flat_products, out=outputs)
            torch.addcmul(self.shifts[i], states, self.scales[i], out=states).relu_()
            place_h.copy_(states)
            if ragged:
                beyond.zero_()
            sums.baddbmm_(pixels, matrices[i], beta=min(1, i))
        return looked_at
