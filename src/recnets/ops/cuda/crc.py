"""A CRC layer in training by the CUDA kernels of this folder: half precision, fp32 statistics and accumulation.

Maps are rows (N, H, W, C), C = d · s; x may also be (d · N, H, W, s_in), a step's maps after the other's, and so is dx.
What `supports` refuses runs by the Triton kernels, which compute the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from recnets.ops.cuda import grad_plan, kernels, nvrtc, plan
from recnets.ops.cuda.grad_plan import GradPlan
from recnets.ops.cuda.kernels import multiprocessors
from recnets.ops.cuda.plan import Layer, cdiv

COPIES = 4  # of the sums, see common.cuh


def layer_of(rows: Tensor, weight_x: Tensor, weight_h: Tensor, d: int) -> Layer:
    n, h, w, channels = rows.shape
    so, si, kx, _ = weight_x.shape
    apart = d > 1 and channels == si
    if apart and n % d:
        raise ValueError(f"{n} maps of {si} channels are not those of {d} steps")
    return Layer(n // d if apart else n, h, w, d, si, so, kx, weight_h.shape[-1], apart)


def step(name: str, layer: Layer, index: int) -> plan.Plan | None:
    """The plan of "forward" or "backward" on CUDA device `index`."""
    return plan.step(name, layer, multiprocessors(index), kernels.has_wgmma(index))


def supports(x: Tensor, layer: Layer) -> bool:
    """Is there a plan for every kernel of this layer on this device?"""
    if not kernels.takes(x):
        return False
    count = multiprocessors(x.get_device())
    return (
        step("forward", layer, x.get_device()) is not None
        and step("backward", layer, x.get_device()) is not None
        and plan.input_grad(layer, count) is not None
        and grad_plan.weight_grad(layer, layer.si, layer.kx, False) is not None
        and grad_plan.weight_grad(layer, layer.so, layer.kh, False) is not None
    )


def _kernel(name: str, x: Tensor, defines: dict[str, int], shared: int) -> nvrtc.Kernel:
    return kernels.kernel(name, x.dtype, x.get_device(), defines, shared)


@cache
def _prepare(layer: Layer, dtype: torch.dtype, index: int, batch: bool, relu: bool) -> None:
    """Start compiling what the backward pass will need, while the forward pass is compiled and runs."""
    backward = step("backward", layer, index)
    grad = grad_plan.weight_grad(layer, layer.so, layer.kh, True, kernels.has_wgmma(index))
    if backward is not None:
        constants = {**backward.defines(layer), **sigma_defines(batch=batch, relu=relu)}
        kernels.compile_ahead(backward.kernel("backward"), dtype, index, constants)
    if grad is not None:
        kernels.compile_ahead(grad.kernel, dtype, index, grad.defines(layer, layer.so, layer.kh, 1))


class Job(ctypes.Structure):
    """`Job` of pack.cuh."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("stride_co", ctypes.c_long), ("stride_ci", ctypes.c_long), ("stride_tap", ctypes.c_long),
        ("total", ctypes.c_int), ("channels", ctypes.c_int), ("outputs", ctypes.c_int), ("taps", ctypes.c_int),
        ("nb", ctypes.c_int), ("transposed", ctypes.c_int), ("columns", ctypes.c_int), ("first", ctypes.c_int),
        ("apart", ctypes.c_int),
    )  # fmt: skip


class Order(NamedTuple):
    """How a kernel is packed, see pack.cuh: `nb` outputs together; with `columns`, for so many blocks, as factors.

    Such a kernel that does not begin with the first column lies beside the one before it.
    """

    nb: int
    columns: int = 0
    first: int = 0
    apart: int = 0
    blocks: int = 1


def _orders(name: str, chosen: plan.Plan, layer: Layer, narrow: plan.Plan | None) -> tuple[Order, Order]:
    """Of W_h and W_x, in a pass by this plan; `narrow` is that of dx where it is computed apart."""
    nb, splits, dx = chosen.nb, layer.so // chosen.nb, 8 * chosen.dx_tiles
    if not chosen.wide:
        return Order(nb), Order(nb if narrow is None else chosen.dx or narrow.nb)
    if name == "forward":
        return Order(nb, nb, 0, nb, splits), Order(nb, nb, 0, nb, splits)
    of_h = Order(nb, nb + dx, 0, nb, splits)
    if dx:
        return of_h, Order(dx, nb + dx, nb, dx if chosen.dx_split else 0, splits)
    assert narrow is not None
    return of_h, Order(narrow.nb)


def pack(
    weights: tuple[Tensor, Tensor], orders: tuple[Order, Order], like: Tensor, sums: Sums, *, transposed: bool
) -> list[Tensor]:
    """Two kernels (c_out, c_in, k, k) in these orders; `sums` become zero.

    `transposed` gives those of the gradient's convolution.
    """
    jobs: list[Job] = []
    packed: list[Tensor] = []
    kept: list[Tensor] = []
    for weight, order in zip(weights, orders, strict=True):
        c_out, c_in, k, _ = weight.shape
        channels, outputs = (c_out, c_in) if transposed else (c_in, c_out)
        rounded = order.blocks * order.nb if order.columns else plan.round_up(outputs, order.nb)
        total = plan.packed_bytes(channels, k, rounded) // 2
        size = total // order.nb * order.columns if order.columns else total
        packed.append(packed[-1] if order.first else torch.empty(size, dtype=like.dtype, device=like.device))
        kept.append(weight.detach().float())
        strides = (kept[-1].stride(0), kept[-1].stride(1), kept[-1].stride(3))
        pointers = (kept[-1].data_ptr(), packed[-1].data_ptr())
        jobs.append(Job(*pointers, *strides, total, channels, outputs, k * k, order.nb, int(transposed), *order[1:4]))
    kernel = _kernel("pack", like, {"THREADS": 256}, 0)
    count = sums.zeros.numel()
    kernel((cdiv(max(count, *(job.total for job in jobs)), 256), 3, 1), *jobs, sums.zeros, count)
    return packed


class _Parts(ctypes.Structure):
    """`Job` of add_parts.cu."""

    _fields_ = (
        ("parts", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("stride_co", ctypes.c_long), ("stride_ci", ctypes.c_long), ("stride_tap", ctypes.c_long),
        ("count", ctypes.c_int), ("taps", ctypes.c_int), ("channels", ctypes.c_int), ("outputs", ctypes.c_int),
    )  # fmt: skip


def add_parts(parts: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients like the two weights, from their parts (count, taps, channels, s_out)."""
    grads = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
    jobs = [
        _Parts(part.data_ptr(), grad.data_ptr(), grad.stride(0), grad.stride(1), grad.stride(3), *part.shape)
        for part, grad in zip(parts, grads, strict=True)
    ]
    kernel = _kernel("add_parts", parts[0], {"THREADS": 256}, 0)
    kernel((cdiv(max(grad.numel() for grad in grads), 32), 2, 1), *jobs)
    return [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]


class Sums:
    """Two sums a step and channel, in copies; a counter a step for the blocks' wait; and the sums' totals.

    `pack` clears what the next launch adds to.
    """

    def __init__(self, layer: Layer, device: torch.device, known: Tensor | None = None) -> None:
        size = COPIES * 2 * layer.d * layer.so
        self.zeros = torch.empty(size + layer.d, dtype=torch.float32, device=device)
        # Counters are integers, whose zero is the same.
        self.copies, self.counters = self.zeros[:size], self.zeros[size:]
        shape = (2, layer.d, layer.so)
        self.total = torch.empty(shape, dtype=torch.float32, device=device) if known is None else known


def _grid(kernel: nvrtc.Kernel, chosen: plan.Plan, layer: Layer, device: int) -> tuple[int, int, int]:
    """Blocks of a cooperative launch: one for every tile and split, no more than the device holds at once."""
    splits, tiles = layer.so // chosen.nb, chosen.tile.count(layer)
    most = kernel.resident() * multiprocessors(device) // splits
    least = tiles if chosen.single else 1
    if most < least:
        raise RuntimeError(f"{kernel.name} needs {least * splits} blocks at once for {layer}")
    return min(tiles, most) * splits, 1, 1


def sigma_defines(*, batch: bool, relu: bool) -> dict[str, int]:
    """Constants of σ_i: are its statistics those of the batch, and does it end in ReLU?"""
    return {"BATCH": int(batch), "RELU": int(relu)}


def forward(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor | None, *,
    layer: Layer, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(h, z, sums): rows of hidden states, pre-activations, and Σz and Σz² as (2, d, s_out).

    z, which only `backward` reads, is (d · N, H, W, s_out): a step's maps after the other's.
    `statistics`, mean and variance as (2, d, s_out), take the place of the sums where they are known.
    """
    device = x.get_device()
    chosen = step("forward", layer, device)
    assert chosen is not None
    _prepare(layer, x.dtype, device, statistics is None, relu)
    constants = {**chosen.defines(layer), **sigma_defines(batch=statistics is None, relu=relu)}
    kernel = _kernel(chosen.kernel("forward"), x, constants, chosen.shared)
    z = torch.empty(layer.d * layer.n, layer.h, layer.w, layer.so, dtype=x.dtype, device=x.device)
    h = z.new_empty(layer.n, layer.h, layer.w, layer.d * layer.so)
    sums = Sums(layer, x.device, statistics)
    packed_h, packed_x = pack((weight_h, weight_x), _orders("forward", chosen, layer, None), x, sums, transposed=False)
    kernel(
        _grid(kernel, chosen, layer, device), x, packed_x, packed_h, gamma.float().contiguous(),
        beta.float().contiguous(), z, h, sums.copies, sums.counters, sums.total, layer.n, float(eps), cooperative=True,
    )  # fmt: skip
    return h, z, sums.total


def backward(
    dh: Tensor, x: Tensor, h: Tensor, z: Tensor, sums: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor,
    beta: Tensor, *, layer: Layer, eps: float, batch: bool, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dW_x, dW_h, the sums (2, d, s_out) that are the gradients of β and γ)."""
    device, count = x.get_device(), multiprocessors(x.get_device())
    chosen = step("backward", layer, device)
    assert chosen is not None
    constants = {**chosen.defines(layer), **sigma_defines(batch=batch, relu=relu)}
    kernel = _kernel(chosen.kernel("backward"), x, constants, chosen.shared)
    grad_sums = Sums(layer, x.device)
    masked = torch.empty(2, layer.n * layer.h * layer.w, layer.so, dtype=x.dtype, device=x.device)
    dz = torch.empty_like(z)
    dx = torch.empty_like(x)
    narrow = plan.input_grad(layer, count)
    assert narrow is not None
    packed_h, packed_x = pack(
        (weight_h, weight_x), _orders("backward", chosen, layer, narrow), x, grad_sums, transposed=True
    )
    kernel(
        _grid(kernel, chosen, layer, device), dh, packed_h, packed_x, gamma.float().contiguous(),
        beta.float().contiguous(), z, sums, masked, dz, dx, grad_sums.copies, grad_sums.counters, grad_sums.total,
        layer.n, float(eps), cooperative=True,
    )  # fmt: skip
    if not chosen.dx:
        kernel = _kernel("input_grad", x, narrow.defines(layer), narrow.shared)
        blocks = min(narrow.tile.count(layer) * layer.d, kernel.resident() * count)
        kernel((blocks, 1, 1), dz, packed_x, dx, layer.n)
    dwx, dwh = add_parts(weight_grads(x, h, dz, layer), (weight_x, weight_h))
    return dx, dwx, dwh, grad_sums.total


def weight_grads(x: Tensor, h: Tensor, dz: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Parts (parts, taps, channels, s_out) of the gradients of W_x and of W_h; dz like z."""
    along = grad_plan.weight_grad(layer, layer.so, layer.kh, True, kernels.has_wgmma(x.get_device()))
    if along is None or layer.d == 1:
        alone = (grad_plan.weight_grad(layer, s, k, False) for s, k in ((layer.si, layer.kx), (layer.so, layer.kh)))
        of_x, of_h = alone
        assert of_x is not None
        assert of_h is not None
        return (
            _weight_grad(x, None, dz, layer, of_x, layer.si, layer.kx, lag=0)[0],
            _weight_grad(h, None, dz, layer, of_h, layer.so, layer.kh, lag=1)[0],
        )
    dwh, dwx = _weight_grad(h, x, dz, layer, along, layer.so, layer.kh, lag=1)
    assert dwx is not None
    return dwx, dwh


def _weight_grad(
    a: Tensor,
    x: Tensor | None,
    dz: Tensor,
    layer: Layer,
    chosen: GradPlan,
    channels: int,
    size: int,
    *,
    lag: int,
) -> tuple[Tensor, Tensor | None]:
    """Parts of the gradient of a kernel whose input at step i is a_{i-lag}, and of W_x where x comes along."""
    taps = size * size
    if layer.d == lag:
        return torch.zeros(1, taps, channels, layer.so, dtype=torch.float32, device=a.device), None
    kernel = _kernel(chosen.kernel, a, chosen.defines(layer, channels, size, lag), chosen.shared)
    steps = layer.d - (0 if chosen.x else lag)
    resident = kernel.resident() * multiprocessors(a.get_device())
    blocks = max(1, min(chosen.tile.count(layer) * steps, resident // (chosen.blocks[0] * chosen.blocks[1])))
    parts = torch.empty(blocks, taps, channels, layer.so, dtype=torch.float32, device=a.device)
    parts_x = parts.new_empty(blocks, taps, layer.si, layer.so) if x is not None else None
    second = (a, parts) if x is None or parts_x is None else (x, parts_x)
    kernel((blocks, *chosen.blocks), a, second[0], dz, parts, second[1], layer.n)
    return parts, parts_x
