"""The fused CRC layer as PyTorch operators: `crc`, differentiable, and the update of running statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from recnets.ops.cuda import crc as cuda_crc
from recnets.ops.cuda import norm_relu as cuda_norm
from recnets.ops.torch import apart, together
from recnets.ops.triton import backward as bwd
from recnets.ops.triton import forward as fwd
from recnets.ops.triton.tiles import Tiles, grad_parts, grad_tiles, power, stages, step_tiles

ELEMENTWISE = 1024
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Run an operator on its first tensor's device: Triton launches on the current one, which may be another."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return run


def rows_of(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H, W, C) contiguous; a view where x is in channels-last order already."""
    return x.permute(0, 2, 3, 1).contiguous()


def map_of(rows: Tensor) -> Tensor:
    """The inverse of `rows_of`, a view."""
    return rows.permute(0, 3, 1, 2)


def _precision(dtype: torch.dtype) -> str:
    """fp32 means fp32 unless the user allowed tf32 for convolutions, as in PyTorch."""
    return "tf32" if dtype == torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"


def _block(channels: int, largest: int = 64) -> int:
    """How many channels one product takes: a power of two of at least 16 that divides where it can."""
    power = 16
    while power < largest and channels % (2 * power) == 0:
        power *= 2
    return power if channels >= 16 else 16


def _strides(weight: Tensor) -> tuple[int, int, int]:
    """Of output channel, input channel and tap; taps are one dimension in every memory format of a square kernel."""
    return weight.stride(0), weight.stride(1), weight.stride(3)


def _pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(c_out, c_in, k, k) -> (k·k, c_in, c_out) in the compute dtype."""
    c_out, c_in, k, _ = weight.shape
    packed = torch.empty(k * k, c_in, c_out, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(packed.numel(), ELEMENTWISE),)
    fwd.pack_kernel[grid](weight, packed, packed.numel(), *_strides(weight), c_in, c_out, ELEMENTWISE)
    return packed


def _halo(kernel: int, tile: int, height: int, width: int) -> int:
    """Pixels before and after a tile that a step reads; none where tiles are whole images."""
    return 0 if kernel == 1 or tile % (height * width) == 0 else width + 1


def rows_block(channels: int) -> tuple[int, int]:
    """(channels padded to a power of two, pixels at a time) for the elementwise parts."""
    padded = triton.next_power_of_2(channels)
    return padded, max(1, 8192 // padded)


@cache
def _dependent_launch(device: torch.device) -> bool:
    """Can a launch start before the one it follows has ended? From compute capability 9 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _early(x: Tensor, follows: bool) -> dict[str, bool]:
    """Launch options of a step that directly follows another step."""
    early = follows and _dependent_launch(x.device)
    return {"PDL": early, "launch_pdl": early} if x.is_cuda else {"PDL": False}


def _launch(tiles: Tiles, columns: int, channels: int, x: Tensor) -> dict[str, int]:
    """Launch options of a convolution of so many channels in tiles of BM pixels by `columns` outputs."""
    fitting = stages(tiles.stages, tiles.bm, columns, channels, x.device, x.element_size())
    return {"num_warps": tiles.warps, "num_stages": fitting}


class Sums:
    """Two sums a channel and step: added atomically, or in a fixed order where determinism is asked for."""

    def __init__(self, d: int, s_out: int, programs: int, device: torch.device, known: Tensor | None = None) -> None:
        self.atomic = known is not None or not torch.are_deterministic_algorithms_enabled()
        self.total = torch.zeros(2, d, s_out, dtype=torch.float32, device=device) if known is None else known
        self.parts = self.total if self.atomic else torch.empty(programs, 2, s_out, dtype=torch.float32, device=device)

    def finish(self, i: int) -> None:
        """After launch i: add the programs' parts, if they were kept apart."""
        if not self.atomic:
            self.total[:, i] = self.parts.sum(0)


def _forward(
    x: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    gamma: Tensor,
    beta: Tensor,
    statistics: Tensor | None,
    d: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All launches of a forward pass of rows (N, H, W, d·s_in): h (N, H, W, d·s_out), z (d·N, H, W, s_out), sums."""
    n, height, width, _ = x.shape
    s_out, s_in, kernel_x, _ = weight_x.shape
    kernel_h = weight_h.shape[-1]
    pixels = n * height * width
    h = torch.empty(n, height, width, d * s_out, dtype=x.dtype, device=x.device)
    z = h.new_empty(d * n, height, width, s_out)
    wx, wh = _pack(weight_x, x.dtype), _pack(weight_h, x.dtype)
    gamma, beta = gamma.contiguous(), beta.contiguous()
    tiles = step_tiles("forward", pixels, s_out, x.device, x.element_size())
    grid = (triton.cdiv(pixels, tiles.bm), triton.cdiv(s_out, tiles.bn))
    batch = statistics is None
    sums = Sums(d, s_out, grid[0], x.device, statistics)
    padded, block = rows_block(s_out)
    taps = 16 // triton.next_power_of_2(s_in) if s_in <= 8 and kernel_x > 1 else 1
    for i in range(d):
        fwd.forward_step_kernel[grid](
            x, wx, wh, gamma, beta, z, h, sums.total, sums.parts, i, pixels, eps,
            height, width, d, s_in, s_out, kernel_x, kernel_h,
            BM=tiles.bm, BN=tiles.bn, BKX=_block(s_in), BKH=_block(s_out), TAPS=taps,
            HALO=_halo(kernel_h, tiles.bm, height, width), BC=padded, BP=block,
            PRECISION=_precision(x.dtype), ATOMIC=sums.atomic, UNROLL=tiles.unroll, BATCH=batch, RELU=relu,
            **_launch(tiles, tiles.bn, max(s_in, s_out), x), **_early(x, i > 0 and sums.atomic),
        )  # fmt: skip
        sums.finish(i)
    fwd.activate_kernel[(triton.cdiv(pixels, block),)](
        z, h, sums.total, gamma, beta, d - 1, pixels, eps, d, s_out, padded, block, block, batch, relu
    )
    return h, z, sums.total


@torch.library.custom_op("recnets::crc", mutates_args=())
@on_its_device
def crc(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor | None, d: int,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h_i = ReLU(BN_i(x_i ⊛ W_x + h_{i-1} ⊛ W_h)): (hidden states, pre-activations, sums).

    x (N, d·s_in, H, W) -> h (N, d·s_out, H, W), z (d·N, s_out, H, W), a step's maps after the other's, both in
    channels-last order, and sums (2, d, s_out): Σz and Σz². x may be in z's order too, as a norm with `segments`
    leaves it.
    `statistics` (2, d, s_out), mean and variance in float32, take the place of the batch's; there are no sums then.
    γ and β are (d·s_out); without `relu` the ReLU is left out.
    """
    rows = rows_of(x)
    layer = cuda_crc.layer_of(rows, weight_x, weight_h, d)
    by_cuda = _by_cuda(rows, layer)
    run = partial(cuda_crc.forward, layer=layer) if by_cuda else partial(_forward, d=d)
    rows = rows if by_cuda or not layer.apart else rows_of(together(x, d))
    h, z, sums = run(rows, weight_x, weight_h, gamma, beta, statistics, eps=eps, relu=relu)
    return map_of(h), map_of(z), sums if statistics is None else sums.new_empty(0)


def takes_apart(y: Tensor, weight_x: Tensor, weight_h: Tensor, d: int, pool: bool) -> bool:
    """Do the CUDA kernels take the norm of this map, with pooling or without, and the CRC layer after it?"""
    n, _, height, width = y.shape
    s_out, s_in, kernel_x, _ = weight_x.shape
    size = (height // 2, width // 2) if pool else (height, width)
    layer = cuda_crc.Layer(n, *size, d, s_in, s_out, kernel_x, weight_h.shape[-1], apart=True)
    return cuda_norm.supports(y.permute(0, 2, 3, 1), pool, d) and _by_cuda(y, layer)


def _by_cuda(rows: Tensor, layer: cuda_crc.Layer) -> bool:
    """Do the CUDA kernels run? They add statistics in any order, so not where determinism is asked for."""
    return not torch.are_deterministic_algorithms_enabled() and cuda_crc.supports(rows, layer)


@crc.register_fake
def _(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor | None, d: int,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, channels, height, width = x.shape
    s_out, s_in, _, _ = weight_x.shape
    count = n * channels // (d * s_in)
    h, z = (x.new_empty(maps, height, width, c) for maps, c in ((count, d * s_out), (d * count, s_out)))
    sums = (2, d, s_out) if statistics is None else (0,)
    return map_of(h), map_of(z), x.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("recnets::crc_backward", mutates_args=())
@on_its_device
def crc_backward(
    dh: Tensor, x: Tensor, h: Tensor, z: Tensor, sums: Tensor, weight_x: Tensor, weight_h: Tensor,
    gamma: Tensor, beta: Tensor, eps: float, batch: bool, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, W_x, W_h, and of (β, γ) as (2, d, s_out), from the gradient of the hidden states.

    `sums` are those of the batch, or else the known statistics.
    """
    rows, dh, h, z = rows_of(x), rows_of(dh), rows_of(h), rows_of(z)
    n, height, width, _ = h.shape
    _, d, s_out = sums.shape
    layer = cuda_crc.layer_of(rows, weight_x, weight_h, d)
    if _by_cuda(rows, layer):
        tensors = (dh, rows, h, z, sums, weight_x, weight_h, gamma, beta)
        dx, dwx, dwh, total = cuda_crc.backward(*tensors, layer=layer, eps=eps, batch=batch, relu=relu)
        return map_of(dx), dwx, dwh, total
    rows = rows_of(together(x, d)) if layer.apart else rows
    s_in, kernel_x, kernel_h = weight_x.shape[1], weight_x.shape[-1], weight_h.shape[-1]
    pixels = n * height * width
    wx, wh = _pack(weight_x, x.dtype), _pack(weight_h, x.dtype)
    gamma, beta = gamma.contiguous(), beta.contiguous()
    tiles = step_tiles("backward", pixels, s_out, x.device, x.element_size())
    grid = (triton.cdiv(pixels, tiles.bm), triton.cdiv(s_out, tiles.bn))
    gsums = Sums(d, s_out, grid[0], x.device)
    padded, block = rows_block(s_out)
    g = torch.empty(2, pixels, s_out, dtype=x.dtype, device=x.device)
    dz = torch.empty_like(h)
    precision = _precision(x.dtype)
    for i in reversed(range(d)):
        bwd.backward_step_kernel[grid](
            dh, wh, gamma, beta, z, sums, g[(i + 1) % 2], g[i % 2], dz, gsums.total, gsums.parts, i, pixels, eps,
            height, width, d, s_out, kernel_h,
            BM=tiles.bm, BN=tiles.bn, BKH=_block(s_out), HALO=_halo(kernel_h, tiles.bm, height, width),
            BC=padded, BP=block, PRECISION=precision, ATOMIC=gsums.atomic, UNROLL=tiles.unroll, BATCH=batch, RELU=relu,
            **_launch(tiles, tiles.bn, s_out, x), **_early(x, i < d - 1 and gsums.atomic),
        )  # fmt: skip
        gsums.finish(i)
    bwd.norm_grad_kernel[(triton.cdiv(pixels, block),)](
        g[0], z, dz, sums, gsums.total, gamma, beta, pixels, eps, d, s_out, padded, block, block, batch, relu
    )
    dx = torch.empty_like(rows)
    tiles = step_tiles("input", pixels, power(s_in), x.device, x.element_size())
    bwd.input_grad_kernel[(triton.cdiv(pixels, tiles.bm), d)](
        dz, wx, dx, pixels, height, width, d, s_in, s_out, kernel_x,
        BM=tiles.bm, BN=power(s_in), BK=_block(s_out), PRECISION=precision, UNROLL=tiles.unroll,
        **_launch(tiles, power(s_in), s_out, x),
    )  # fmt: skip
    dwx = _weight_grad(rows, dz, weight_x, d, lag=0)
    dwh = _weight_grad(h, dz, weight_h, d, lag=1)
    return apart(map_of(dx), d) if layer.apart else map_of(dx), dwx, dwh, gsums.total


def _weight_grad(a: Tensor, dz: Tensor, weight: Tensor, d: int, lag: int) -> Tensor:
    """dW of a convolution whose input at step i is a_{i-lag} (N, H, W, d·c) and whose output gradient is dz_i."""
    s_out, channels, kernel, _ = weight.shape
    n, height, width, _ = a.shape
    if d == lag:
        return torch.zeros_like(weight)
    pixels = n * height * width
    tiles = grad_tiles(pixels, s_out, kernel * channels, weight.numel(), a.device, a.element_size())
    columns = kernel * triton.cdiv(kernel * channels, tiles.bn)
    out_blocks = triton.cdiv(s_out, tiles.bo)
    chunks, each, count = grad_parts(pixels, d - lag, columns * out_blocks, tiles, a.device)
    parts = torch.empty(count, kernel * kernel, channels, s_out, dtype=torch.float32, device=a.device)
    fitting = stages(tiles.stages, tiles.bo, tiles.bn, tiles.bp, a.device, a.element_size())
    bwd.weight_grad_kernel[(count, columns, out_blocks)](
        a, dz, parts, pixels, chunks, each, height, width, d, channels, s_out, kernel, lag,
        BO=tiles.bo, BN=tiles.bn, BP=tiles.bp, PRECISION=_precision(a.dtype),
        num_warps=tiles.warps, num_stages=fitting,
    )  # fmt: skip
    grad = torch.empty_like(weight)
    grid = (triton.cdiv(grad.numel(), 64),)
    bwd.weight_sum_kernel[grid](parts, grad, count, *_strides(grad), channels, s_out, kernel * kernel, 64, 64)
    return grad


@crc_backward.register_fake
def _(
    dh: Tensor, x: Tensor, h: Tensor, z: Tensor, sums: Tensor, weight_x: Tensor, weight_h: Tensor,
    gamma: Tensor, beta: Tensor, eps: float, batch: bool, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, channels, height, width = x.shape
    dx = map_of(x.new_empty(n, height, width, channels))
    return dx, torch.empty_like(weight_x), torch.empty_like(weight_h), torch.empty_like(sums)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight_x, weight_h, gamma, beta, statistics, _, eps, relu = inputs
    h, z, sums = output
    ctx.mark_non_differentiable(z, sums)
    ctx.set_materialize_grads(False)  # else autograd would fill zeros for z and the sums
    ctx.save_for_backward(x, h, z, sums if statistics is None else statistics, weight_x, weight_h, gamma, beta)
    ctx.settings = (eps, statistics is None, relu)


def _backward(ctx: Any, dh: Tensor | None, dz: None, dsums: None) -> tuple[Tensor | None, ...]:
    if dh is None:
        return (None,) * 9
    *saved, gamma, beta = ctx.saved_tensors
    dx, dwx, dwh, dnorm = crc_backward(dh, *saved, gamma, beta, *ctx.settings)
    dbeta, dgamma = dnorm.flatten(1)
    return dx, dwx, dwh, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), None, None, None, None


crc.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("recnets::update_running", mutates_args=("mean", "var"))
@on_its_device
def update_running(sums: Tensor, mean: Tensor, var: Tensor, pixels: int, momentum: float) -> None:
    """Move running statistics towards the batch's sums (2, d, s_out) over `pixels` pixels.

    They are (d·s_out) each, or (s_out) where one norm is shared: that moves d times, step after step.
    """
    channels = mean.numel()
    steps = sums[0].numel() // channels
    grid = (triton.cdiv(channels, ELEMENTWISE),)
    fwd.running_kernel[grid](sums, mean, var, momentum, pixels, channels, steps, ELEMENTWISE)


@update_running.register_fake
def _(sums: Tensor, mean: Tensor, var: Tensor, pixels: int, momentum: float) -> None:
    return None
