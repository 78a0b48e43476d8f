"""The stem's convolution of a picture with few channels as one matrix product of gathered neighbourhoods.

A product takes channels in eights; of a picture with three, a convolution would fill most of them with zeros, 9 times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recnets.ops.triton.op import on_its_device, rows_of

WIDTH = 32
"""Values of a gathered neighbourhood, 3×3 pixels of up to 3 channels and zeros."""


@triton.jit(do_not_specialize=["M"])
def gather_kernel(x, out, M, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BP: tl.constexpr):
    """Of each pixel of rows (N, H, W, C), (tap, channel) of its 3×3 neighbours, zeros outside and up to WIDTH.

    Rows, not any strides: pictures of two channels, each in one piece, came out wrong so on a GPU (Triton 3.6; right in
    the interpreter).
    """
    q = (tl.program_id(0) * BP + tl.arange(0, BP)[:, None]).to(tl.int64)
    k = tl.arange(0, WIDTH)[None, :]
    row = (q // W) % H + k // C // 3 - 1
    column = q % W + k // C % 3 - 1
    ok = (q < M) & (k < 9 * C) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = x + ((q // (H * W) * H + row) * W + column) * C + k % C
    value = tl.load(at, mask=ok, other=0.0)
    tl.store(out + q * WIDTH + k, value.to(out.dtype.element_ty), mask=q < M)


@torch.library.custom_op("recnets::neighbours", mutates_args=())
@on_its_device
def neighbours(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, C, H, W) of up to 3 channels -> (N, H, W, 32): 3×3 pixels, a pixel's channels together; no gradient."""
    n, channels, height, width = x.shape
    out = torch.empty(n, height, width, WIDTH, dtype=dtype, device=x.device)
    pixels, block = n * height * width, 128
    gather_kernel[(triton.cdiv(pixels, block),)](rows_of(x), out, pixels, height, width, channels, WIDTH, block)
    return out


@neighbours.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    n, _, height, width = x.shape
    return x.new_empty(n, height, width, WIDTH, dtype=dtype)
