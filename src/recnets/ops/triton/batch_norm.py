"""BN + ReLU of a whole map (stem and transition) in training: two launches forward, two backward.

A map is a CRC of one step without convolutions, so the row functions of the step kernels serve here with D = 1.
`norm_relu_pool_train` ends in 2×2 max pooling: only the pooled map is written, and the backward pass finds the maxima
anew. BN comes first: where its weight is negative, the largest output is that of the smallest input.

With `segments` the output is (segments · N, C / segments, H, W), a segment's maps after the other's: so the CUDA
kernels of a CRC layer read it in one piece a step.

Where the CUDA kernels can run, each way is one launch of theirs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recnets.ops.cuda import norm_relu as cuda
from recnets.ops.torch import apart, together
from recnets.ops.triton import backward as bwd
from recnets.ops.triton import forward as fwd
from recnets.ops.triton.op import Sums, map_of, on_its_device, rows_block, rows_of
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


@triton.jit
def window_rows(w, windows, H: tl.constexpr, W: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr):
    """Of 2×2 windows, WH × WW an image: the row of the first pixel; has one it, and those right, below, opposite?"""
    y = 2 * ((w // WW) % WH)
    x = 2 * (w % WW)
    ok = w < windows
    right = ok & (x + 1 < W)
    below = ok & (y + 1 < H)
    return (w // (WH * WW) * H + y) * W + x, ok, right, below, right & below


@triton.jit
def load_window(y, row, ok, right, below, both, c, W: tl.constexpr, C: tl.constexpr):
    """The four pixels of windows in PyTorch's order, each (windows, channels), in fp32."""
    at = y + row[:, None] * C + c[None, :]
    real = (c < C)[None, :]
    p = tl.load(at, mask=ok[:, None] & real, other=0.0).to(tl.float32)
    q = tl.load(at + C, mask=right[:, None] & real, other=0.0).to(tl.float32)
    r = tl.load(at + W * C, mask=below[:, None] & real, other=0.0).to(tl.float32)
    s = tl.load(at + (W + 1) * C, mask=both[:, None] & real, other=0.0).to(tl.float32)
    return p, q, r, s


@triton.jit
def window_maximum(p, q, r, s, scale, shift):
    """The largest of BN's four outputs, NaN if one is, and which is the first to have it."""
    p = p * scale[None, :] + shift[None, :]
    q = q * scale[None, :] + shift[None, :]
    r = r * scale[None, :] + shift[None, :]
    s = s * scale[None, :] + shift[None, :]
    upper = tl.maximum(p, q, propagate_nan=tl.PropagateNan.ALL)
    lower = tl.maximum(r, s, propagate_nan=tl.PropagateNan.ALL)
    best = tl.maximum(upper, lower, propagate_nan=tl.PropagateNan.ALL)
    is_p = p == best
    is_q = (q == best) & (p < best)
    is_r = (r == best) & (upper < best)
    return best, is_p, is_q, is_r, (upper < best) & (r < best)


@triton.jit(do_not_specialize=["M", "windows"])
def pool_kernel(
    y, out, sums, gamma, beta, M, windows, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The largest ReLU(BN(y)) of each window."""
    c = tl.arange(0, BC)
    w = tl.program_id(0) * BP + tl.arange(0, BP)
    scale, shift, _, _ = fwd.batch_affine(sums, gamma, beta, 0, c, M, eps, 1, C, True)
    row, ok, right, below, both = window_rows(w, windows, H, W, H // 2, W // 2)
    p, q, r, s = load_window(y, row, ok, right, below, both, c, W, C)
    best, _, _, _, _ = window_maximum(p, q, r, s, scale, shift)
    best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty)
    tl.store(out + w[:, None] * C + c[None, :], best, mask=ok[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["M", "windows", "each"])
def pool_grad_sums_kernel(
    g, y, sums, gsums, parts, gamma, beta, M, windows, each, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Σm and Σm·ŷ over the windows of a program's share; m is g at a window's maximum where that is positive."""
    c = tl.arange(0, BC)
    scale, shift, rstd, mean = fwd.batch_affine(sums, gamma, beta, 0, c, M, eps, 1, C, True)
    first = tl.program_id(0) * each
    total = tl.zeros((BP, BC), dtype=tl.float32)
    products = tl.zeros((BP, BC), dtype=tl.float32)
    for w0 in range(first, first + each, BP):
        w = w0 + tl.arange(0, BP)
        row, ok, right, below, both = window_rows(w, tl.minimum(windows, first + each), H, W, H // 2, W // 2)
        p, q, r, s = load_window(y, row, ok, right, below, both, c, W, C)
        best, is_p, is_q, is_r, _ = window_maximum(p, q, r, s, scale, shift)
        pre = tl.where(is_p, p, tl.where(is_q, q, tl.where(is_r, r, s)))
        value = tl.load(g + w[:, None] * C + c[None, :], mask=ok[:, None] & (c < C)[None, :], other=0.0)
        value = tl.where(best > 0, value.to(tl.float32), 0.0)
        total += value
        products += value * (pre - mean[None, :]) * rstd[None, :]
    fwd.add_sums(gsums, parts, 0, c, tl.sum(total, 0), tl.sum(products, 0), 1, C, ATOMIC)


@triton.jit
def store_grad(at, mask, m, pre, scale, rstd, mean, mean_m, mean_my):
    """dy = γ/σ · (m - mean(m) - ŷ · mean(m·ŷ))."""
    yhat = (pre - mean[None, :]) * rstd[None, :]
    value = scale[None, :] * (m - mean_m[None, :] - yhat * mean_my[None, :])
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "windows"])
def pool_grad_kernel(
    g, y, dy, sums, gsums, gamma, beta, M, windows, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dy of all pixels. A window that the border cuts was not pooled: its pixels have no m, but a part in the means."""
    c = tl.arange(0, BC)
    real = (c < C)[None, :]
    w = tl.program_id(0) * BP + tl.arange(0, BP)
    scale, shift, rstd, mean = fwd.batch_affine(sums, gamma, beta, 0, c, M, eps, 1, C, True)
    mean_m = tl.load(gsums + c, mask=c < C, other=0.0) / M
    mean_my = tl.load(gsums + C + c, mask=c < C, other=0.0) / M
    WH: tl.constexpr = (H + 1) // 2
    WW: tl.constexpr = (W + 1) // 2
    row, ok, right, below, both = window_rows(w, windows, H, W, WH, WW)
    p, q, r, s = load_window(y, row, ok, right, below, both, c, W, C)
    best, is_p, is_q, is_r, is_s = window_maximum(p, q, r, s, scale, shift)
    pooled = (w // (WH * WW) * (H // 2) + (w // WW) % WH) * (W // 2) + w % WW
    m = tl.load(g + pooled[:, None] * C + c[None, :], mask=both[:, None] & real, other=0.0).to(tl.float32)
    m = tl.where(best > 0, m, 0.0)
    at = dy + row[:, None] * C + c[None, :]
    store_grad(at, ok[:, None] & real, tl.where(is_p, m, 0.0), p, scale, rstd, mean, mean_m, mean_my)
    at += C
    store_grad(at, right[:, None] & real, tl.where(is_q, m, 0.0), q, scale, rstd, mean, mean_m, mean_my)
    at += (W - 1) * C
    store_grad(at, below[:, None] & real, tl.where(is_r, m, 0.0), r, scale, rstd, mean, mean_m, mean_my)
    at += C
    store_grad(at, both[:, None] & real, tl.where(is_s, m, 0.0), s, scale, rstd, mean, mean_m, mean_my)


def _shares(rows: int, block: int, device: torch.device, programs: int = 2) -> tuple[int, int]:
    """(rows a program, programs) for the column sums, with so many programs a multiprocessor."""
    each = block * triton.cdiv(triton.cdiv(rows, programs * multiprocessors(device)), block)
    return each, triton.cdiv(rows, each)


def window_block(channels: int) -> tuple[int, int]:
    """(channels padded to a power of two, windows at a time): the four pixels of each are in registers."""
    padded, block = rows_block(channels)
    return padded, max(1, block // 4)


def _by_cuda(rows: Tensor, pool: bool, segments: int) -> bool:
    """Do the CUDA kernels run? They add statistics in any order, so not where determinism is asked for."""
    return not torch.are_deterministic_algorithms_enabled() and cuda.supports(rows, pool, segments)


def _sums(rows: Tensor) -> Sums:
    """Σy and Σy² of (N, H, W, C) over the pixels."""
    channels = rows.shape[3]
    pixels = rows.numel() // channels
    padded, block = rows_block(channels)
    each, programs = _shares(pixels, block, rows.device)
    sums = Sums(1, channels, programs, rows.device)
    sums_kernel[(programs,)](rows, sums.total, sums.parts, pixels, each, channels, padded, block, sums.atomic)
    sums.finish(0)
    return sums


@torch.library.custom_op("recnets::norm_relu_train", mutates_args=())
@on_its_device
def norm_relu_train(y: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int) -> tuple[Tensor, Tensor]:
    """ReLU(BN(y)) with batch statistics: (N, C, H, W) -> the same, and sums (2, 1, C): Σy and Σy²."""
    rows = rows_of(y)
    if _by_cuda(rows, False, segments):
        out, total = cuda.forward(rows, gamma, beta, eps, False, segments)
        return map_of(out), total
    n, height, width, channels = rows.shape
    pixels = n * height * width
    padded, block = rows_block(channels)
    sums = _sums(rows)
    out = torch.empty_like(rows)
    fwd.activate_kernel[(triton.cdiv(pixels, block),)](
        rows, out, sums.total, gamma, beta, 0, pixels, eps, 1, channels, padded, block, block, True, True
    )
    return apart(map_of(out), segments), sums.total


@norm_relu_train.register_fake
def _(y: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int) -> tuple[Tensor, Tensor]:
    n, channels, height, width = y.shape
    out = map_of(y.new_empty(segments * n, height, width, channels // segments))
    return out, y.new_empty(2, 1, channels, dtype=torch.float32)


@torch.library.custom_op("recnets::norm_relu_train_backward", mutates_args=())
@on_its_device
def norm_relu_train_backward(
    g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int
) -> tuple[Tensor, Tensor]:
    """Gradient of y, and of (β, γ) as (2, 1, C)."""
    rows = rows_of(y)
    if _by_cuda(rows, False, segments):
        dy, total = cuda.backward(rows_of(g), rows, sums, gamma, beta, eps, False, segments)
        return map_of(dy), total
    g = rows_of(together(g, segments))
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
        g, rows, dy, sums, gsums.total, gamma, beta, pixels, eps, 1, channels, padded, block, block, True, True
    )
    return map_of(dy), gsums.total


@norm_relu_train_backward.register_fake
def _fake_backward(
    g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int
) -> tuple[Tensor, Tensor]:
    n, channels, height, width = y.shape
    return map_of(y.new_empty(n, height, width, channels)), torch.empty_like(sums)


@torch.library.custom_op("recnets::norm_relu_pool_train", mutates_args=())
@on_its_device
def norm_relu_pool_train(y: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int) -> tuple[Tensor, Tensor]:
    """2×2 maxima of ReLU(BN(y)): (N, C, H, W) -> (N, C, H // 2, W // 2), and sums (2, 1, C): Σy and Σy²."""
    rows = rows_of(y)
    if _by_cuda(rows, True, segments):
        out, total = cuda.forward(rows, gamma, beta, eps, True, segments)
        return map_of(out), total
    n, height, width, channels = rows.shape
    padded, block = window_block(channels)
    sums = _sums(rows)
    out = rows.new_empty(n, height // 2, width // 2, channels)
    windows = n * (height // 2) * (width // 2)
    pool_kernel[(triton.cdiv(windows, block),)](
        rows, out, sums.total, gamma, beta, n * height * width, windows, eps, height, width, channels, padded, block
    )
    return apart(map_of(out), segments), sums.total


@norm_relu_pool_train.register_fake
def _(y: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int) -> tuple[Tensor, Tensor]:
    n, channels, height, width = y.shape
    out = map_of(y.new_empty(segments * n, height // 2, width // 2, channels // segments))
    return out, y.new_empty(2, 1, channels, dtype=torch.float32)


@torch.library.custom_op("recnets::norm_relu_pool_train_backward", mutates_args=())
@on_its_device
def norm_relu_pool_train_backward(
    g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float, segments: int
) -> tuple[Tensor, Tensor]:
    """Gradient of y, and of (β, γ) as (2, 1, C). Of equal maxima the first takes the gradient, as in PyTorch."""
    rows = rows_of(y)
    if _by_cuda(rows, True, segments):
        dy, total = cuda.backward(rows_of(g), rows, sums, gamma, beta, eps, True, segments)
        return map_of(dy), total
    g = rows_of(together(g, segments))
    n, height, width, channels = rows.shape
    pixels = n * height * width
    shape = (height, width, channels, *window_block(channels))
    block = shape[-1]
    windows = n * (height // 2) * (width // 2)
    each, programs = _shares(windows, block, y.device, 4)
    gsums = Sums(1, channels, programs, y.device)
    pool_grad_sums_kernel[(programs,)](
        g, rows, sums, gsums.total, gsums.parts, gamma, beta, pixels, windows, each, eps, *shape, gsums.atomic,
        num_warps=8,
    )  # fmt: skip
    gsums.finish(0)
    dy = torch.empty_like(rows)
    windows = n * triton.cdiv(height, 2) * triton.cdiv(width, 2)
    pool_grad_kernel[(triton.cdiv(windows, block),)](
        g, rows, dy, sums, gsums.total, gamma, beta, pixels, windows, eps, *shape, num_warps=8
    )
    return map_of(dy), gsums.total


norm_relu_pool_train_backward.register_fake(_fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, gamma, beta, eps, segments = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, output[1], gamma, beta)
    ctx.settings = (eps, segments)


def _autograd(operator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward function of an operator (y, γ, β, eps, segments) -> (output, sums) by its backward operator."""

    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        y, sums, gamma, beta = ctx.saved_tensors
        dy, dnorm = operator(g, y, sums, gamma, beta, *ctx.settings)
        dbeta, dgamma = dnorm.flatten(1).to(gamma.dtype)
        return dy, dgamma, dbeta, None, None

    return backward


norm_relu_train.register_autograd(_autograd(norm_relu_train_backward), setup_context=_setup_context)
norm_relu_pool_train.register_autograd(_autograd(norm_relu_pool_train_backward), setup_context=_setup_context)
