"""BN + ReLU of a whole map in training by the CUDA kernels, with or without the 2×2 max pooling after it.

With `segments` the output is (segments · N, H, W, C / segments): a segment's maps after the other's; so its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recnets.ops.cuda import kernels, nvrtc, plan
from recnets.ops.cuda.kernels import multiprocessors
from recnets.ops.cuda.plan import cdiv

WIDEST = 2048  # a block of 256 threads has one for each 8 channels


class MapPlan(NamedTuple):
    """Constants of a kernel: threads a block, whether a block keeps its share, units a block, blocks, shared memory."""

    threads: int
    keep: bool
    each: int
    blocks: int
    shared: int


def map_plan(units: int, channels: int, pool: bool, backward: bool, count: int) -> MapPlan:
    """A block a multiprocessor that keeps its share where that fits, else two that read theirs twice."""
    slots = (4 if pool else 1) + (1 if backward else 0)
    each = cdiv(units, count)
    for threads in (512, 256):
        fixed = threads * 64 + (4 if backward else 2) * channels * 4
        shared = fixed + each * slots * channels * 2
        if shared <= plan.SHARED:
            return MapPlan(threads, True, each, cdiv(units, each), shared)
    each = cdiv(units, 2 * count)
    return MapPlan(256, False, each, cdiv(units, each), 256 * 64 + (4 if backward else 2) * channels * 4)


def supports(y: Tensor, pool: bool, segments: int = 1) -> bool:
    """y: rows (N, H, W, C) in half precision, segments of a multiple of 8; pooled maps of even height and width."""
    if not kernels.takes(y):
        return False
    _, height, width, channels = y.shape
    return channels % (8 * segments) == 0 and channels <= WIDEST and not (pool and (height % 2 or width % 2))


def _kernel(name: str, y: Tensor, chosen: MapPlan, pool: bool, segments: int) -> nvrtc.Kernel:
    _, height, width, channels = y.shape
    size = (height, width) if pool else (0, 0)
    constants = {"C": channels, "POOL": int(pool), "KEEP": int(chosen.keep), "H": size[0], "W": size[1]}
    defines = {**constants, "THREADS": chosen.threads, "SEGMENT": channels // segments}
    return kernels.kernel(name, y.dtype, y.get_device(), defines, chosen.shared)


def _zeros(channels: int, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (2, 1, C) and the counter of the wait, in one clearing."""
    zeros = torch.zeros(2 * channels + 1, dtype=torch.float32, device=y.device)
    return zeros[: 2 * channels].view(2, 1, channels), zeros[2 * channels :]


def forward(y: Tensor, gamma: Tensor, beta: Tensor, eps: float, pool: bool, segments: int = 1) -> tuple[Tensor, Tensor]:
    """(output rows, Σy and Σy² as (2, 1, C))."""
    n, height, width, channels = y.shape
    size = (height // 2, width // 2) if pool else (height, width)
    out = y.new_empty(segments * n, *size, channels // segments)
    units = out.numel() // channels
    chosen = map_plan(units, channels, pool, False, multiprocessors(y.get_device()))
    sums, counter = _zeros(channels, y)
    _kernel("norm_relu_forward", y, chosen, pool, segments)(
        (chosen.blocks, 1, 1), y, gamma.float().contiguous(), beta.float().contiguous(), out, sums, counter, units,
        chosen.each, float(n * height * width), float(eps), cooperative=True,
    )  # fmt: skip
    return out, sums


def backward(
    g: Tensor, y: Tensor, sums: Tensor, gamma: Tensor, beta: Tensor, eps: float, pool: bool, segments: int = 1
) -> tuple[Tensor, Tensor]:
    """(dy, the sums (2, 1, C) that are the gradients of β and γ)."""
    n, height, width, channels = y.shape
    units = g.numel() // channels
    chosen = map_plan(units, channels, pool, True, multiprocessors(y.get_device()))
    grad_sums, counter = _zeros(channels, y)
    dy = torch.empty_like(y)
    _kernel("norm_relu_backward", y, chosen, pool, segments)(
        (chosen.blocks, 1, 1), g, y, sums, gamma.float().contiguous(), beta.float().contiguous(), dy, grad_sums,
        counter, units, chosen.each, float(n * height * width), float(eps), cooperative=True,
    )  # fmt: skip
    return dy, grad_sums
