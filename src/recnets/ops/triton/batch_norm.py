"""BN + ReLU of a whole map (stem and transition) in training: two launches forward, two backward.

A map is a CRC of one step without convolutions, so the row functions of the step kernels serve here with D = 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recnets.ops.triton import backward as bwd
from recnets.ops.triton import forward as fwd
from recnets.ops.triton.op import Sums, map_of, rows_block, rows_of
from recnets.ops.triton.tiles import multiprocessors


@triton.jit(do_not_specialize=["M", "each"])
def sums_kernel(y, sums, parts, M, each, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, ATOMIC: tl.constexpr):
    """Σy and Σy² over the rows of a program's share."""
    c = tl.arange(0, BC)
    first = tl.program_id(0) * each
    total = tl.zeros((BP, BC), dtype=tl.float32)
    squares = tl.zeros((BP, BC), dtype=tl.float32)
    for q0 in range(first, first + each, BP):
        q = q0 + tl.arange(0, BP)
        ok = ((q < first + each) & (q < M))[:, None] & (c < C)[None, :]
        value = tl.load(y + q[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    fwd.add_sums(sums, parts, 0, c, tl.sum(total, 0), tl.sum(squares, 0), 1, C, ATOMIC)


@triton.jit(do_not_specialize=["M", "each"])
def grad_sums_kernel(
    g, y, sums, gsums, parts, gamma, beta, M, each, eps,
    C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Σm and Σm·ŷ with m = g·[output > 0] over the rows of a program's share."""
    c = tl.arange(0, BC)
    scale, shift, rstd, mean = fwd.batch_affine(sums, gamma, beta, 0, c, M, eps, 1, C, True)
    first = tl.program_id(0) * each
    total = tl.zeros((BP, BC), dtype=tl.float32)
    products = tl.zeros((BP, BC), dtype=tl.float32)
    for q0 in range(first, first + each, BP):
        q = q0 + tl.arange(0, BP)
        ok = ((q < first + each) & (q < M))[:, None] & (c < C)[None, :]
        at = q[:, None] * C + c[None, :]
        pre = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(g + at, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(pre * scale[None, :] + shift[None, :] > 0, value, 0.0)
        total += value
        products += value * (pre - mean[None, :]) * rstd[None, :]
    fwd.add_sums(gsums, parts, 0, c, tl.sum(total, 0), tl.sum(products, 0), 1, C, ATOMIC)


def _shares(pixels: int, block: int, device: torch.device) -> tuple[int, int]:
    """(rows a program, programs) for the column sums: two programs a multiprocessor."""
    each = block * triton.cdiv(triton.cdiv(pixels, 2 * multiprocessors(device)), block)
    return each, triton.cdiv(pixels, each)


@torch.library.custom_op("recnets::norm_relu_train", mutates_args=())
def norm_relu_train(y: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """ReLU(BN(y)) with batch statistics: (N, C, H, W) -> the same, and sums (2, 1, C): Σy and Σy²."""
    rows = rows_of(y)
    n, height, width, channels = rows.shape
    pixels = n * height * width
    padded, block = rows_block(channels)
    each, programs = _shares(pixels, block, y.device)
    sums = Sums(1, channels, programs, y.device)
    sums_kernel[(programs,)](rows, sums.total, sums.parts, pixels, each, channels, padded, block, sums.atomic)
    sums.finish(0)
    out = torch.empty_like(rows)
    fwd.activate_kernel[(triton.cdiv(pixels, block),)](
        rows, out, sums.total, gamma, beta, 0, pixels, eps, 1, channels, padded, block, block, True
    )
    return map_of(out), sums.total


@norm_relu_train.register_fake
def _(y: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, channels, height, width = y.shape
    return map_of(y.new_empty(n, height, width, channels)), y.new_empty(2, 1, channels, dtype=torch.float32)


@torch.library.custom_op("recnets::norm_relu_train_backward", mutates_args=())
def norm_relu_train_backward(
    g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradient of y, and of (β, γ) as (2, 1, C)."""
    g, rows = rows_of(g), rows_of(y)
    n, height, width, channels = rows.shape
    pixels = n * height * width
    padded, block = rows_block(channels)
    each, programs = _shares(pixels, block, y.device)
    gsums = Sums(1, channels, programs, y.device)
    grad_sums_kernel[(programs,)](
        g, rows, sums, gsums.total, gsums.parts, gamma, beta, pixels, each, eps, channels, padded, block, gsums.atomic
    )
    gsums.finish(0)
    dy = torch.empty_like(rows)
    bwd.norm_grad_kernel[(triton.cdiv(pixels, block),)](
        g, rows, dy, sums, gsums.total, gamma, beta, pixels, eps, 1, channels, padded, block, block
    )
    return map_of(dy), gsums.total


@norm_relu_train_backward.register_fake
def _(g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    n, channels, height, width = y.shape
    return map_of(y.new_empty(n, height, width, channels)), torch.empty_like(sums)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, gamma, beta, eps = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, output[1], gamma, beta)
    ctx.eps = eps


def _backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 4
    y, sums, gamma, beta = ctx.saved_tensors
    dy, dnorm = norm_relu_train_backward(g, y, sums, gamma, beta, ctx.eps)
    dbeta, dgamma = dnorm.flatten(1).to(gamma.dtype)
    return dy, dgamma, dbeta, None


norm_relu_train.register_autograd(_backward, setup_context=_setup_context)
