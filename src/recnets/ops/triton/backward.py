"""Backward of a CRC layer (Eq. 2 to 4).

Only dh is sequential. Launch i (from the last step down) finishes dz_{i+1} for its tile and halo from the
gradient g_{i+1} and the two sums that BN's backward needs, then computes
g_i = dh_i + dz_{i+1} ⊛ W_hᵀ and, where h_i > 0, the sums of g_i and g_i·ẑ_i. The gradients of x, W_x and W_h have no
recurrence: one launch each over all steps, the weight gradients in parts that a last launch adds in a fixed order.
BATCH and RELU as in forward.py: known statistics have no part in the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from recnets.ops.triton.forward import add_sums, batch_affine, conv_rows


@triton.jit
def norm_grad_rows(
    g, z, dz, sums, gsums, gamma, beta, i, start, stop, M, eps,
    D: tl.constexpr, SO: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dz_i = γ_i/σ_i · (m - mean(m) - ẑ_i · mean(m·ẑ_i)), m = g_i·[h_i > 0], for the pixels start .. stop.

    Without BATCH dz_i = γ_i/σ_i · m.
    """
    c = tl.arange(0, BC)
    ok_c = c < SO
    scale, shift, rstd, mean = batch_affine(sums, gamma, beta, i, c, M, eps, D, SO, BATCH)
    mean_g = tl.load(gsums + i * SO + c, mask=ok_c, other=0.0) / M
    mean_gz = tl.load(gsums + (D + i) * SO + c, mask=ok_c, other=0.0) / M
    for q0 in range(start, stop, BP):
        q = q0 + tl.arange(0, BP)
        ok = ((q >= 0) & (q < stop) & (q < M))[:, None] & ok_c[None, :]
        at = q[:, None] * (D * SO) + i * SO + c[None, :]
        pre = tl.load(z + (i * M + q)[:, None] * SO + c[None, :], mask=ok, other=0.0).to(tl.float32)
        value = tl.load(g + q[:, None] * SO + c[None, :], mask=ok, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(pre * scale[None, :] + shift[None, :] > 0, value, 0.0)
        if BATCH:
            zhat = (pre - mean[None, :]) * rstd[None, :]
            value = value - mean_g[None, :] - zhat * mean_gz[None, :]
        value = scale[None, :] * value
        tl.store(dz + at, value.to(dz.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["i", "M"])
def backward_step_kernel(
    dh, wh, gamma, beta, z, sums, g_next, g, dz, gsums, parts, i, M, eps,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, SO: tl.constexpr, KH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BKH: tl.constexpr, HALO: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    PRECISION: tl.constexpr, ATOMIC: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
    BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Launch i of the backward pass: dz_{i+1} from g_{i+1}, then g_i and its two sums.

    With PDL it starts while launch i+1 still runs, and loads dh_i and z_i, which no launch of the pass writes.
    """
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BM
    p = first + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    valid = p < M
    ok = valid[:, None] & (n < SO)[None, :]
    at = p[:, None] * (D * SO) + i * SO + n[None, :]
    acc = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(z + (i * M + p)[:, None] * SO + n[None, :], mask=ok, other=0.0).to(tl.float32)
    scale, shift, rstd, mean = batch_affine(sums, gamma, beta, i, n, M, eps, D, SO, BATCH)
    if PDL:
        gdc_wait()
    if i < D - 1:
        start = first - HALO
        stop = first + BM + HALO
        norm_grad_rows(g_next, z, dz, sums, gsums, gamma, beta, i + 1, start, stop, M, eps, D, SO, BC, BP, BATCH, RELU)
        tl.debug_barrier()
        px = p % W
        py = (p // W) % H
        column = (i + 1) * SO
        acc = conv_rows(
            acc, dz, wh, p, py, px, valid, n, D * SO, column, -1, SO, SO, KH, H, W, BKH, True, PRECISION, UNROLL
        )
    passes = ok
    if RELU:
        passes = ok & (value * scale[None, :] + shift[None, :] > 0)
    grad = tl.where(passes, acc, 0.0)
    tl.store(g + p[:, None] * SO + n[None, :], acc.to(g.dtype.element_ty), mask=ok)
    zhat = (value - mean[None, :]) * rstd[None, :]
    add_sums(gsums, parts, i, n, tl.sum(grad, 0), tl.sum(grad * zhat, 0), D, SO, ATOMIC)


@triton.jit(do_not_specialize=["M"])
def norm_grad_kernel(
    g, z, dz, sums, gsums, gamma, beta, M, eps, D: tl.constexpr, SO: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr, BATCH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dz_0, which no launch follows; with D = 1, the backward of a plain BN + ReLU."""
    first = tl.program_id(0) * BM
    norm_grad_rows(g, z, dz, sums, gsums, gamma, beta, 0, first, first + BM, M, eps, D, SO, BC, BP, BATCH, RELU)


@triton.jit(do_not_specialize=["M"])
def input_grad_kernel(
    dz, wx, dx, M,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, SI: tl.constexpr, SO: tl.constexpr, KX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx_i = dz_i ⊛ W_xᵀ for all steps at once."""
    i = tl.program_id(1)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    valid = p < M
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    acc = conv_rows(
        acc,
        dz,
        wx,
        p,
        (p // W) % H,
        p % W,
        valid,
        n,
        D * SO,
        i * SO,
        -1,
        SO,
        SI,
        KX,
        H,
        W,
        BK,
        True,
        PRECISION,
        UNROLL,
    )
    ok = valid[:, None] & (n < SI)[None, :]
    tl.store(dx + p[:, None] * (D * SI) + i * SI + n[None, :], acc.to(dx.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "chunks", "each"])
def weight_grad_kernel(
    a, dz, parts, M, chunks, each,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, CA: tl.constexpr, SO: tl.constexpr, K: tl.constexpr,
    LAG: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW[tap, ci, co] = Σ_i Σ_p a_{i-LAG}(p + tap)[ci] · dz_i(p)[co], in parts over (step, pixels).

    A program takes one row of taps (their columns lie side by side, so neighbouring taps are read from L1), a block
    of BN of its K·CA columns, and `each` chunks of BP pixels. LAG is 0 for W_x and 1 for W_h.
    """
    part = tl.program_id(0)
    blocks = tl.cdiv(K * CA, BN)
    dy = tl.program_id(1) // blocks - K // 2
    column = (tl.program_id(1) % blocks) * BN + tl.arange(0, BN)
    co = tl.program_id(2) * BO + tl.arange(0, BO)
    ci = column % CA
    dx = column // CA - K // 2
    ok_column = column < K * CA
    acc = tl.zeros((BO, BN), dtype=tl.float32)
    for c in range(part * each, tl.minimum((part + 1) * each, chunks * (D - LAG))):
        i = c // chunks + LAG
        p = (c % chunks) * BP + tl.arange(0, BP)
        valid = p < M
        y = (p // W) % H + dy
        x = (p % W)[:, None] + dx[None, :]
        ok = (valid & (y >= 0) & (y < H))[:, None] & (x >= 0) & (x < W) & ok_column[None, :]
        at = (p + dy * W)[:, None] * (D * CA) + (dx * (D * CA) + ci)[None, :] + (i - LAG) * CA
        if CA % 8 == 0:  # the compiler cannot see through the division that a tap's channels lie together
            at = tl.max_contiguous(tl.multiple_of(at, (1, 8)), (1, 8))
            ok = tl.max_constancy(ok, (1, 8))
        image = tl.load(a + at, mask=ok, other=0.0)
        grad = tl.load(
            dz + p[:, None] * (D * SO) + i * SO + co[None, :], mask=valid[:, None] & (co < SO)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(grad), image, acc, input_precision=PRECISION)
    tap = (dy + K // 2) * K + dx + K // 2
    at = ((part * K * K + tap) * CA + ci)[None, :] * SO + co[:, None]
    tl.store(parts + at, acc, mask=ok_column[None, :] & (co < SO)[:, None])


@triton.jit(do_not_specialize=["count"])
def weight_sum_kernel(
    parts, dw, count, stride_co, stride_ci, stride_tap,
    CA: tl.constexpr, SO: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Add the parts in a fixed order and lay the sum out as the weight: (taps, CA, SO) -> (SO, CA, k, k)."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = o < TAPS * CA * SO
    acc = tl.zeros((BS, BLOCK), dtype=tl.float32)
    for s0 in range(0, count, BS):
        s = s0 + tl.arange(0, BS)
        at = s[:, None] * (TAPS * CA * SO) + o[None, :]
        acc += tl.load(parts + at, mask=(s < count)[:, None] & ok[None, :], other=0.0)
    co = o % SO
    ci = (o // SO) % CA
    tap = o // (SO * CA)
    at = co * stride_co + ci * stride_ci + tap * stride_tap
    tl.store(dw + at, tl.sum(acc, 0).to(dw.dtype.element_ty), mask=ok)
