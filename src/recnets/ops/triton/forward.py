"""Forward of a CRC layer (Eq. 2 to 4) as one launch a step.

Pixels are rows: a map (N, C, H, W) in channels-last order is a matrix (M, C), M = N·H·W, and step i owns columns
i·s .. (i+1)·s. A step's batch normalisation needs the sums over the whole batch, which is a grid-wide dependency,
and a launch is the cheapest grid-wide barrier under a CUDA graph. So launch i

1. finishes step i-1 for its tile and the halo around it: h_{i-1} = ReLU(BN_{i-1}(z_{i-1})). Tiles overlap in their
   halos and write the same values there, which spares a second barrier a step;
2. computes z_i = x_i ⊛ W_x + h_{i-1} ⊛ W_h as an implicit matrix product over the taps, in fp32;
3. stores z_i and adds its sums and sums of squares.

Without BATCH the statistics are known: running ones, or 0 and 1 where a step has no BN, only a bias as its shift.
Without RELU the recursion is linear.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pack_kernel(
    w, out, total, stride_co, stride_ci, stride_tap, CI: tl.constexpr, CO: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(CO, CI, k, k) of any strides -> (taps, CI, CO) in the compute dtype, so that a tap's matrix is contiguous."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    co = o % CO
    ci = (o // CO) % CI
    tap = o // (CO * CI)
    value = tl.load(w + co * stride_co + ci * stride_ci + tap * stride_tap, mask=o < total, other=0.0)
    tl.store(out + o, value.to(out.dtype.element_ty), mask=o < total)


@triton.jit
def batch_affine(sums, gamma, beta, i, c, M, eps, D: tl.constexpr, SO: tl.constexpr, BATCH: tl.constexpr):
    """BN of step i as z·scale + shift; also 1/sqrt(var + eps) and the mean.

    `sums` (2, D, SO) holds Σz and Σz² over the batch, or, without BATCH, the mean and the variance.
    """
    ok = c < SO
    mean = tl.load(sums + i * SO + c, mask=ok, other=0.0)
    var = tl.load(sums + (D + i) * SO + c, mask=ok, other=1.0)
    if BATCH:
        mean = mean / M
        var = var / M - mean * mean
    rstd = 1.0 / tl.sqrt(tl.maximum(var, 0.0) + eps)
    scale = tl.load(gamma + i * SO + c, mask=ok, other=0.0).to(tl.float32) * rstd
    shift = tl.load(beta + i * SO + c, mask=ok, other=0.0).to(tl.float32) - mean * scale
    return scale, shift, rstd, mean


@triton.jit
def add_sums(sums, parts, i, n, first, second, D: tl.constexpr, SO: tl.constexpr, ATOMIC: tl.constexpr):
    """Add a program's two sums to step i's; not ATOMIC leaves them as its own part, to be added in a fixed order."""
    if ATOMIC:
        tl.atomic_add(sums + i * SO + n, first, mask=n < SO, sem="relaxed")
        tl.atomic_add(sums + (D + i) * SO + n, second, mask=n < SO, sem="relaxed")
    else:
        at = parts + tl.program_id(0) * (2 * SO) + n
        tl.store(at, first, mask=n < SO)
        tl.store(at + SO, second, mask=n < SO)


@triton.jit
def activate_rows(
    z, h, sums, gamma, beta, i, start, stop, M, eps,
    D: tl.constexpr, SO: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """h_i = ReLU(BN_i(z_i)) for the pixels start .. stop."""
    c = tl.arange(0, BC)
    scale, shift, _, _ = batch_affine(sums, gamma, beta, i, c, M, eps, D, SO, BATCH)
    for q0 in range(start, stop, BP):
        q = q0 + tl.arange(0, BP)
        ok = ((q >= 0) & (q < stop) & (q < M))[:, None] & (c < SO)[None, :]
        value = tl.load(z + (i * M + q)[:, None] * SO + c[None, :], mask=ok, other=0.0).to(tl.float32)
        value = value * scale[None, :] + shift[None, :]
        if RELU:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(h + q[:, None] * (D * SO) + i * SO + c[None, :], value.to(h.dtype.element_ty), mask=ok)


@triton.jit
def conv_tap(
    acc, a, w, p, py, px, valid, n, stride, column, tap, sign,
    CA: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (BM, BN) += a[p + sign·tap] · w[tap]."""
    k = tl.arange(0, BK)
    dy = sign * (tap // K - K // 2)
    dx = sign * (tap % K - K // 2)
    ok = valid & (py + dy >= 0) & (py + dy < H) & (px + dx >= 0) & (px + dx < W)
    row = (p + dy * W + dx) * stride + column
    for k0 in tl.static_range(0, CA, BK):
        if CA % BK == 0:
            part = tl.load(a + row[:, None] + (k0 + k)[None, :], mask=ok[:, None], other=0.0)
        else:
            real = ok[:, None] & (k0 + k < CA)[None, :]
            part = tl.load(a + row[:, None] + (k0 + k)[None, :], mask=real, other=0.0)
        if TRANSPOSED:
            at = (tap * CO + n[:, None]) * CA + (k0 + k)[None, :]
            matrix = tl.trans(tl.load(w + at, mask=(n < CO)[:, None] & (k0 + k < CA)[None, :], other=0.0))
        else:
            at = (tap * CA + k0 + k[:, None]) * CO + n[None, :]
            matrix = tl.load(w + at, mask=(k0 + k < CA)[:, None] & (n < CO)[None, :], other=0.0)
        acc = tl.dot(part, matrix, acc, input_precision=PRECISION)
    return acc


@triton.jit
def conv_rows(
    acc, a, w, p, py, px, valid, n, stride, column, sign,
    CA: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc (BM, BN) += Σ_taps a[p + sign·tap] · w[tap], `a` a matrix of pixels whose segment starts at `column`.

    w is packed (taps, CI, CO). TRANSPOSED takes a tap's matrix as (CO, CI), which with sign = -1 is the gradient.
    """
    if UNROLL:
        for tap in tl.static_range(K * K):
            acc = conv_tap(
                acc, a, w, p, py, px, valid, n, stride, column, tap, sign, CA, CO, K, H, W, BK, TRANSPOSED, PRECISION
            )
    else:
        for tap in range(K * K):
            acc = conv_tap(
                acc, a, w, p, py, px, valid, n, stride, column, tap, sign, CA, CO, K, H, W, BK, TRANSPOSED, PRECISION
            )
    return acc


@triton.jit
def conv_taps(
    acc, a, w, p, py, px, valid, n, stride, column, t0,
    CA: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    TAPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TAPS taps from t0 side by side, for segments so narrow that one alone would leave a product half empty."""
    k = tl.arange(0, 16)
    ci = k % (16 // TAPS)
    tap = t0 + k // (16 // TAPS)
    dy = tap // K - K // 2
    dx = tap % K - K // 2
    y = py[:, None] + dy[None, :]
    x = px[:, None] + dx[None, :]
    real = (tap < K * K) & (ci < CA)
    ok = valid[:, None] & (y >= 0) & (y < H) & (x >= 0) & (x < W) & real[None, :]
    source = (p[:, None] + (dy * W + dx)[None, :]) * stride + column + ci[None, :]
    if CA == 16 // TAPS:  # the compiler cannot see through the division that a tap's channels lie together
        source = tl.max_contiguous(tl.multiple_of(source, (1, CA)), (1, CA))
        ok = tl.max_constancy(ok, (1, CA))
    part = tl.load(a + source, mask=ok, other=0.0)
    matrix = tl.load(w + (tap * CA + ci)[:, None] * CO + n[None, :], mask=real[:, None] & (n < CO)[None, :], other=0.0)
    return tl.dot(part, matrix, acc, input_precision=PRECISION)


@triton.jit
def conv_rows_narrow(
    acc, a, w, p, py, px, valid, n, stride, column,
    CA: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    TAPS: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`conv_rows` for segments narrower than a tensor core's 16."""
    if UNROLL:
        for t0 in tl.static_range(0, K * K, TAPS):
            acc = conv_taps(acc, a, w, p, py, px, valid, n, stride, column, t0, CA, CO, K, H, W, TAPS, PRECISION)
    else:
        for t0 in range(0, K * K, TAPS):
            acc = conv_taps(acc, a, w, p, py, px, valid, n, stride, column, t0, CA, CO, K, H, W, TAPS, PRECISION)
    return acc


@triton.jit(do_not_specialize=["i", "M"])
def forward_step_kernel(
    x, wx, wh, gamma, beta, z, h, sums, parts, i, M, eps,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, SI: tl.constexpr, SO: tl.constexpr,
    KX: tl.constexpr, KH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BKX: tl.constexpr, BKH: tl.constexpr,
    TAPS: tl.constexpr, HALO: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
    ATOMIC: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr, BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Launch i of the forward pass; see the head of this file.

    With PDL (programmatic dependent launch) it starts while launch i-1 still runs, does the part of x, which depends
    on no launch of the pass, and waits before it touches anything else.
    """
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BM
    p = first + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid = p < M
    px = p % W
    py = (p // W) % H
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    column = i * SI
    if TAPS > 1:
        acc = conv_rows_narrow(
            acc, x, wx, p, py, px, valid, n, D * SI, column, SI, SO, KX, H, W, TAPS, PRECISION, UNROLL
        )
    else:
        acc = conv_rows(
            acc, x, wx, p, py, px, valid, n, D * SI, column, 1, SI, SO, KX, H, W, BKX, False, PRECISION, UNROLL
        )
    if PDL:
        gdc_wait()
    if i > 0:
        start = first - HALO
        stop = first + BM + HALO
        activate_rows(z, h, sums, gamma, beta, i - 1, start, stop, M, eps, D, SO, BC, BP, BATCH, RELU)
        tl.debug_barrier()
        column = (i - 1) * SO
        acc = conv_rows(
            acc, h, wh, p, py, px, valid, n, D * SO, column, 1, SO, SO, KH, H, W, BKH, False, PRECISION, UNROLL
        )
    ok = n < SO
    tl.store(z + (i * M + p)[:, None] * SO + n[None, :], acc.to(z.dtype.element_ty), mask=valid[:, None] & ok[None, :])
    if BATCH:
        add_sums(sums, parts, i, n, tl.sum(acc, 0), tl.sum(acc * acc, 0), D, SO, ATOMIC)


@triton.jit(do_not_specialize=["i", "M"])
def activate_kernel(
    z, h, sums, gamma, beta, i, M, eps, D: tl.constexpr, SO: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BP: tl.constexpr, BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """h_i from z_i for the last step, which no launch follows."""
    first = tl.program_id(0) * BM
    activate_rows(z, h, sums, gamma, beta, i, first, first + BM, M, eps, D, SO, BC, BP, BATCH, RELU)


@triton.jit(do_not_specialize=["M"])
def running_kernel(sums, mean, var, momentum, M, C: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Move the running statistics of C channels towards those of the batch, as torch's BN does, STEPS times."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    new_mean = tl.load(mean + c, mask=ok, other=0.0)
    new_var = tl.load(var + c, mask=ok, other=0.0)
    for i in tl.static_range(STEPS):
        batch_mean = tl.load(sums + i * C + c, mask=ok, other=0.0) / M
        squares = tl.load(sums + (STEPS + i) * C + c, mask=ok, other=0.0) / M
        batch_var = tl.maximum(squares - batch_mean * batch_mean, 0.0) * (M / tl.maximum(M - 1.0, 1.0))
        new_mean += momentum * (batch_mean - new_mean)
        new_var += momentum * (batch_var - new_var)
    tl.store(mean + c, new_mean, mask=ok)
    tl.store(var + c, new_var, mask=ok)
