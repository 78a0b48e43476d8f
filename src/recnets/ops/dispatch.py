"""The one place that decides which implementation runs.

"torch" runs anywhere. "triton" is the fused kernels: a CRC layer raises where they cannot run, never falls back
silently; the stem and the transition's norm take them where they can.
"auto" takes the kernels where they can run and plain PyTorch elsewhere, and says so once in the log.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recnets.ops import torch as plain
from recnets.ops.compiler import traced
from recnets.ops.cuda import inference
from recnets.ops.norm import Norm
from recnets.ops.torch import Recurrence

BACKENDS = ("auto", "torch", "triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on the CPU, for tests."""
AVAILABLE = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
if AVAILABLE:
    from recnets.ops.triton import batch_norm as fused_norm
    from recnets.ops.triton import op as fused
    from recnets.ops.triton import stem as fused_stem

LARGEST_S_OUT = 256
APART = False
"""Do maps pass from a norm to the CRC layer after it step by step? By counts faster, but not timed on a GPU yet."""
_log = logging.getLogger("recnets")
_said: set[str] = set()


class Following(NamedTuple):
    """The CRC layer that is next, for a norm that could give it each step's maps in one piece."""

    weight_x: Tensor
    weight_h: Tensor
    recurrence: Recurrence


def missing_kernel(r: Recurrence, kernel_x: int, kernel_h: int, s_in: int, s_out: int) -> str | None:
    """Why no fused kernel exists for these settings, or None where one does."""
    if not r.recurrent:
        return f"the kernels are for the recurrence, got recurrent={r.recurrent}"
    if r.padding_mode != "zeros":
        return f"the kernels pad with zeros, got padding_mode={r.padding_mode!r}"
    if kernel_x not in (1, 3) or kernel_h not in (1, 3):
        return f"the kernels are for sizes 1 and 3, got kernel_x={kernel_x}, kernel_h={kernel_h}"
    if max(s_in, s_out) > LARGEST_S_OUT:
        return f"the kernels are for segments of up to {LARGEST_S_OUT} channels, got s_in={s_in}, s_out={s_out}"
    return None


def check_request(backend: str, r: Recurrence, kernel_x: int, kernel_h: int, s_in: int, s_out: int) -> None:
    """Refuse at construction what can never run: an explicit "triton" without a fused kernel for these settings."""
    if backend != "triton":
        return
    reason = missing_kernel(r, kernel_x, kernel_h, s_in, s_out)
    if reason is None and not AVAILABLE:
        reason = "the kernels need the package 'triton' and a CUDA device (pip install 'recnets[triton]')"
    if reason is not None:
        raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'torch'")


def cannot_run(x: Tensor, norm: Norm | None, widest: int) -> str | None:
    """Why the kernels cannot take this input now, or None where they can. `widest` is the channels of the output."""
    if not AVAILABLE or not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return f"the kernels need a CUDA tensor and the package 'triton', got a tensor on {x.device}"
    if compute_dtype(x) not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels take float32, float16 and bfloat16, got {x.dtype}"
    if x.numel() == 0:
        return f"the kernels need pixels, got {tuple(x.shape)}"
    if norm is not None and (norm.weight is None or norm.bias is None):
        return "the kernels need a norm with weight and bias"
    if norm is not None and norm.weight is not None and norm.weight.device != x.device:
        return f"the kernels need input and norm on one device, got {x.device} and {norm.weight.device}"
    if norm is not None and norm.group is not None:
        return "the kernels do not synchronise batch statistics over processes"
    if x.shape[0] * x.shape[2] * x.shape[3] * max(widest, x.shape[1]) >= 2**31:
        return f"the kernels index with 32 bits, got {x.shape[0] * x.shape[2] * x.shape[3]} pixels of {widest} channels"
    return None


def segments_for(y: Tensor, norm: Norm, following: Following | None, pool: bool) -> int:
    """Into how many segments the norm of y should take its output apart: d where the CUDA kernels run both, else 1.

    A step reads one segment of all pixels. In rows of all channels that is 16 bytes here and there, where memory gives
    64 at a time; in maps of its own it is all that is read.
    """
    if following is None or torch.compiler.is_compiling() or _looked_through("auto") is not None:
        return 1
    weight_x, weight_h, r = following
    s_out, s_in, kernel_x, _ = weight_x.shape
    if r.d == 1 or y.shape[1] != r.d * s_in or y.dtype != compute_dtype(y):
        return 1
    if missing_kernel(r, kernel_x, weight_h.shape[-1], s_in, s_out) or cannot_run(y, norm, r.d * s_out):
        return 1
    return r.d if fused.takes_apart(y, weight_x, weight_h, r.d, pool) else 1


def _taps_in_order(weight: Tensor) -> Tensor:
    """A weight whose taps are one dimension in memory, whatever the order of its channels: what the kernels read."""
    return weight if weight.stride(2) == weight.shape[3] * weight.stride(3) else weight.contiguous()


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x computes in: autocast's dtype where that is on."""
    kind = x.device.type
    cast = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else x.dtype


def _chosen(backend: str, reason: str | None) -> bool:
    """Do the kernels run ("auto" or "triton")? Raises for an explicit request that cannot be met."""
    if reason is None:
        return True
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot run here: {reason}; use backend='auto' or 'torch'")
    if not torch.compiler.is_compiling() and reason not in _said:
        _said.add(reason)
        _log.info("plain PyTorch runs a CRC layer: %s", reason)
    return False


def crc(
    x: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    r: Recurrence,
    *,
    backend: str = "auto",
    apart: bool = False,
) -> Tensor:
    """All hidden states of a CRC layer, (N, d·s_in, H, W) -> (N, d·s_out, H, W).

    `apart`: x is (d·N, s_in, H, W), as a norm leaves it for a layer that it knows as `Following`.
    """
    if backend == "torch" or (backend == "auto" and INTERPRETED):  # the interpreter is for those who ask for it
        return plain.crc(plain.together(x, r.d if apart else 1), weight_x, weight_h, bias, norm, r)
    s_out, s_in = weight_x.shape[:2]
    of_a_step = x[: x.shape[0] // r.d] if apart else x
    reason = missing_kernel(r, weight_x.shape[-1], weight_h.shape[-1], s_in, s_out)
    reason = reason or cannot_run(of_a_step, norm, r.d * s_out)
    reason = reason or _looked_through(backend)
    inside = None if r.nonlinearity == "linear" else norm  # Eq. 4 normalises what the recursion leaves
    if reason is None and weight_x.device != x.device:
        reason = f"the kernels need input and weights on one device, got {x.device} and {weight_x.device}"
    if reason is None and bias is not None and inside is not None:
        reason = "the kernels take a bias or a norm in a step, not both"
    if not _chosen(backend, reason):
        return plain.crc(plain.together(x, r.d if apart else 1), weight_x, weight_h, bias, norm, r)
    weight_x, weight_h = _taps_in_order(weight_x), _taps_in_order(weight_h)
    own = _norm_of_steps(inside, bias, r.d, weight_x)
    known = None
    if not own.batch_statistics:
        assert own.mean is not None
        assert own.var is not None
        known = torch.stack([own.mean, own.var]).float().view(2, r.d, s_out)
    relu = r.nonlinearity != "linear"
    h, z, sums = fused.crc(x.to(compute_dtype(x)), weight_x, weight_h, own.weight, own.bias, known, r.d, own.eps, relu)
    del z  # as wide as h, and only the backward pass needs it
    if inside is not None and known is None:
        _update(sums, inside, of_a_step)
    if relu:
        return h
    return torch.relu(h) if norm is None else norm_relu(h, norm, backend=backend)


def _looked_through(backend: str) -> str | None:
    """Why the kernels cannot run under what now looks at the operators one by one, or None."""
    if forward_ad._current_level >= 0:
        return "the kernels have no forward-mode derivative"
    if traced():
        return "what is traced should run elsewhere too" if backend == "auto" else None
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "the kernels have no rules for the transformations of torch.func"
    return None


def _norm_of_steps(norm: Norm | None, bias: Tensor | None, d: int, weight_x: Tensor) -> Norm:
    """σ_i of all steps as the kernels take it, d·s_out channels.

    One norm for all steps is repeated. Without a norm mean and variance are 0 and 1, and the bias is β.
    """
    channels = d * weight_x.shape[0]

    def each(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[0] == channels else t.repeat(d)

    if norm is None:
        zeros, ones = (torch.full((channels,), v, dtype=torch.float32, device=weight_x.device) for v in (0.0, 1.0))
        return Norm(zeros, ones, ones, zeros if bias is None else each(bias), False, 0.0, 0.0)
    return norm._replace(mean=each(norm.mean), var=each(norm.var), weight=each(norm.weight), bias=each(norm.bias))


def recurrent_eval(
    x: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor | None, norm: Norm | None, matrix: Tensor, last: Norm,
    r: Recurrence, *, backend: str = "auto", pool: bool = False,
) -> Tensor | None:  # fmt: skip
    """A CRC layer and its transition in evaluation by one kernel, where that can run, else None.

    (N, d·s_in, H, W) -> (N, c_out, H, W), with `pool` its 2×2 maxima; matrix: the transition's, (c_out, d·s_out).
    """
    # A compiler would trace the choice of a plan, and what is traced should run elsewhere too.
    if backend == "torch" or not x.is_cuda or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    s_out, s_in, kernel_x, _ = weight_x.shape
    if matrix.shape[1] != r.d * s_out or any(t.device != x.device for t in (weight_x, weight_h, matrix)):
        return None
    if r.nonlinearity == "linear" or (norm is not None and bias is not None):
        return None
    for n in (norm, last):
        if n is not None and (n.batch_statistics or any(t is None for t in (n.mean, n.var, n.weight, n.bias))):
            return None
    if missing_kernel(r, kernel_x, weight_h.shape[-1], s_in, s_out) is not None:
        return None
    x = x.to(compute_dtype(x))
    if not inference.supports(x, inference.module_of(x.permute(0, 2, 3, 1), weight_x, weight_h, matrix, r.d, pool)):
        return None
    norms = (_norm_of_steps(norm, bias, r.d, weight_x), last)
    steps, after = ((n.weight, n.bias, n.mean, n.var, n.eps) for n in norms)
    weight_x, weight_h = _taps_in_order(weight_x), _taps_in_order(weight_h)
    return inference.recurrent_eval(x, weight_x, weight_h, *steps, matrix, *after, r.d, pool)


def norm_relu(
    y: Tensor, norm: Norm, *, backend: str = "auto", pool: bool = False, following: Following | None = None
) -> Tensor:
    """ReLU(BN(y)) of a whole map, (N, C, H, W) -> the same, with `pool` its 2×2 maxima; fused in training.

    For a layer that is `following`, (d·N, C/d, H, W) where the kernels gain by it: a segment's maps after the other's.
    """
    able = norm.batch_statistics and backend != "torch" and cannot_run(y, norm, y.shape[1]) is None
    able = able and not (pool and min(y.shape[2:]) < 2)  # which PyTorch refuses
    if not able or (INTERPRETED and backend != "triton"):
        out = plain.sigma(y, norm)
        return torch.nn.functional.max_pool2d(out, 2) if pool else out
    assert norm.weight is not None
    assert norm.bias is not None
    operator = fused_norm.norm_relu_pool_train if pool else fused_norm.norm_relu_train
    out, sums = operator(y, norm.weight, norm.bias, norm.eps, segments_for(y, norm, following, pool))
    _update(sums, norm, y)
    return out


def stem(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, *, backend: str = "auto",
    following: Following | None = None,
) -> Tensor:  # fmt: skip
    """ReLU(BN(x ⊛ W)) of a picture by a 3×3 kernel, (N, C, H, W) -> (N, c_out, H, W); `following` as in `norm_relu`."""
    dtype = compute_dtype(x)
    grad = torch.is_grad_enabled()
    able = backend != "torch" and (x.is_cuda or (INTERPRETED and backend == "triton")) and weight.shape[1] <= 3
    able = able and AVAILABLE and dtype in (torch.float16, torch.bfloat16)
    # What is gathered has no gradient, backwards or forwards, and what is traced should run elsewhere too.
    able = able and not (grad and x.requires_grad) and forward_ad._current_level < 0
    able = able and not traced()
    if not able or cannot_run(x, norm, max(weight.shape[0], fused_stem.WIDTH)) is not None:
        return norm_relu(plain.conv(x, weight, bias), norm, backend=backend, following=following)
    matrix = weight.permute(0, 2, 3, 1).flatten(1)
    folded = not norm.batch_statistics and not grad
    if folded:
        scale, shift = norm.in_float32().affine()
        matrix = matrix * scale[:, None]
        bias = shift if bias is None else torch.addcmul(shift, bias.float(), scale)
    rows = fused_stem.neighbours(x, dtype)
    matrix = torch.nn.functional.pad(matrix.to(dtype), (0, fused_stem.WIDTH - matrix.shape[1]))
    y = torch.nn.functional.linear(rows, matrix, None if bias is None else bias.to(dtype)).permute(0, 3, 1, 2)
    return y.relu_() if folded else norm_relu(y, norm, backend=backend, following=following)


def _update(sums: Tensor, norm: Norm, x: Tensor) -> None:
    if norm.mean is not None and norm.var is not None:
        fused.update_running(sums.detach(), norm.mean, norm.var, x.shape[0] * x.shape[2] * x.shape[3], norm.momentum)


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """1×1 convolution by (C_out, C_in, 1, 1): one matrix product where x is in channels-last order."""
    rows = x.permute(0, 2, 3, 1)
    if x.is_cuda and rows.is_contiguous():
        return torch.nn.functional.linear(rows, weight.flatten(1)).permute(0, 3, 1, 2)
    return torch.nn.functional.conv2d(x, weight)


def global_mean(x: Tensor) -> Tensor:
    """Each channel's mean over the map, (N, C, H, W) -> (N, C)."""
    rows = x.permute(0, 2, 3, 1)
    if x.is_cuda and rows.is_contiguous():
        return rows.flatten(1, 2).mean(1)  # else its gradient comes in NCHW order, and the kernels copy it
    return x.mean(dim=(2, 3))
