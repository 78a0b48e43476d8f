"""A whole Recurrent module in evaluation by inference.cu: half precision, fp32 accumulation, no hidden state in memory.

Maps are rows (N, H, W, C). What `supports` refuses runs by `Recurrent._stream`, which computes the same.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from recnets.ops.cuda import inference_plan as plan
from recnets.ops.cuda import kernels, nvrtc
from recnets.ops.cuda.crc import Job, layer_of
from recnets.ops.cuda.kernels import multiprocessors
from recnets.ops.cuda.plan import Layer, cdiv, packed_bytes


class EvalNorm(NamedTuple):
    """A batch normalisation in evaluation."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    eps: float


def _kernel(module: plan.Module, chosen: plan.InferencePlan, dtype: torch.dtype, index: int) -> nvrtc.Kernel:
    return kernels.kernel("inference", dtype, index, chosen.defines(module), chosen.shared, chosen.cluster)


def module_of(rows: Tensor, weight_x: Tensor, weight_h: Tensor, matrix: Tensor, d: int, pool: bool) -> plan.Module:
    return plan.Module(layer_of(rows, weight_x, weight_h, d), matrix.shape[0], pool)


def supports(x: Tensor, module: plan.Module) -> bool:
    """Is there a plan for this module on this device, and does a cluster of it fit?"""
    if not kernels.takes(x) or x.shape[0] == 0:
        return False
    index = x.get_device()
    chosen = plan.inference(module, multiprocessors(index))
    return chosen is not None and _kernel(module, chosen, x.dtype, index).clusters_at_once > 0


class _Matrix(ctypes.Structure):
    """`Matrix` of prepare.cu."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("out", ctypes.c_void_p), ("stride_co", ctypes.c_long), ("stride_ci", ctypes.c_long),
        ("total", ctypes.c_int), ("channels", ctypes.c_int), ("outputs", ctypes.c_int), ("d", ctypes.c_int),
        ("twn", ctypes.c_int), ("tnt", ctypes.c_int),
    )  # fmt: skip


class _Affine(ctypes.Structure):
    """`Affine` of prepare.cu."""

    _fields_ = (
        ("gamma", ctypes.c_void_p), ("beta", ctypes.c_void_p), ("mean", ctypes.c_void_p), ("var", ctypes.c_void_p),
        ("out", ctypes.c_void_p), ("channels", ctypes.c_int), ("eps", ctypes.c_float),
    )  # fmt: skip


class Prepared(NamedTuple):
    """What the kernel reads of the parameters."""

    wx: Tensor
    wh: Tensor
    matrices: Tensor
    steps: Tensor
    last: Tensor


def _vector(t: Tensor) -> Tensor:
    return t.detach().float().contiguous()


def prepare(
    weight_x: Tensor, weight_h: Tensor, matrix: Tensor, steps: EvalNorm, last: EvalNorm, layer: Layer,
    chosen: plan.InferencePlan, like: Tensor,
) -> Prepared:  # fmt: skip
    """Kernels and A_i in the order of the tensor cores, norms folded, in one launch; matrix: (C_OUT, d·s_out)."""
    splits, c_out = layer.so // chosen.nb, matrix.shape[0]
    sizes = [packed_bytes(layer.si, layer.kx, layer.so) // 2, packed_bytes(layer.so, layer.kh, layer.so) // 2]
    sizes.append(splits * layer.d * (layer.so // 16) * chosen.last.wn * chosen.last.nt * 128)
    halves = [torch.empty(size, dtype=like.dtype, device=like.device) for size in sizes]
    folded = [
        torch.empty(channels * 2, dtype=torch.float32, device=like.device) for channels in (layer.d * layer.so, c_out)
    ]
    kept: list[Tensor] = [weight.detach().float() for weight in (weight_x, weight_h, matrix)]
    jobs: list[ctypes.Structure] = []
    for weight, packed in zip(kept[:2], halves[:2], strict=True):
        co, ci, k, _ = weight.shape
        strides = (weight.stride(0), weight.stride(1), weight.stride(3))
        jobs.append(Job(weight.data_ptr(), packed.data_ptr(), *strides, packed.numel(), ci, co, k * k, chosen.nb, 0))
    strides2 = (kept[2].stride(0), kept[2].stride(1))
    shape = (sizes[2], layer.so, c_out, layer.d, chosen.last.wn, chosen.last.nt)
    jobs.append(_Matrix(kept[2].data_ptr(), halves[2].data_ptr(), *strides2, *shape))
    for norm, out in zip((steps, last), folded, strict=True):
        vectors = [_vector(t) for t in norm[:4]]
        kept += vectors
        jobs.append(_Affine(*[v.data_ptr() for v in vectors], out.data_ptr(), out.numel() // 2, norm.eps))
    blocks = cdiv(max(*sizes, layer.d * layer.so, c_out), 256)
    kernels.kernel("prepare", like.dtype, like.get_device(), {"THREADS": 256})((blocks, 4, 1), *jobs)
    return Prepared(*halves, *folded)


def run(
    rows: Tensor, weight_x: Tensor, weight_h: Tensor, matrix: Tensor, steps: EvalNorm, last: EvalNorm, d: int, *,
    pool: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows (N, H, W, d·s_in), contiguous -> rows (N, H, W, C_OUT), with `pool` (N, H // 2, W // 2, C_OUT)."""
    if rows.data_ptr() % 16:
        rows = rows.clone()
    module = module_of(rows, weight_x, weight_h, matrix, d, pool)
    layer = module.layer
    chosen = plan.inference(module, multiprocessors(rows.get_device()))
    assert chosen is not None
    kernel = _kernel(module, chosen, rows.dtype, rows.get_device())
    ready = prepare(weight_x, weight_h, matrix, steps, last, layer, chosen, rows)
    height, width = (layer.h // 2, layer.w // 2) if pool else (layer.h, layer.w)
    if out is None:
        out = torch.empty(layer.n, height, width, module.c_out, dtype=rows.dtype, device=rows.device)
    clusters = min(cdiv(layer.n, chosen.images), kernel.clusters_at_once)
    kernel((clusters * chosen.cluster, 1, 1), rows, *ready, out, layer.n)
    return out


@torch.library.custom_op("recnets::recurrent_eval", mutates_args=())
def recurrent_eval(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, eps: float,
    matrix: Tensor, gamma_y: Tensor, beta_y: Tensor, mean_y: Tensor, var_y: Tensor, eps_y: float, d: int, pool: bool,
) -> Tensor:  # fmt: skip
    """A Recurrent module with running statistics, (N, d·s_in, H, W) -> (N, C_OUT, H, W); matrix: (C_OUT, d·s_out)."""
    rows = x.permute(0, 2, 3, 1).contiguous()
    steps, last = EvalNorm(gamma, beta, mean, var, eps), EvalNorm(gamma_y, beta_y, mean_y, var_y, eps_y)
    return run(rows, weight_x, weight_h, matrix, steps, last, d, pool=pool).permute(0, 3, 1, 2)


@recurrent_eval.register_fake
def _(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, eps: float,
    matrix: Tensor, gamma_y: Tensor, beta_y: Tensor, mean_y: Tensor, var_y: Tensor, eps_y: float, d: int, pool: bool,
) -> Tensor:  # fmt: skip
    n, _, height, width = x.shape
    size = (height // 2, width // 2) if pool else (height, width)
    return x.new_empty(n, *size, matrix.shape[0]).permute(0, 3, 1, 2)
