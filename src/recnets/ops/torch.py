"""The recurrence in plain PyTorch, in the two ways that a device can run it.

`crc` (concat) computes the x-convolutions of all d steps in one call and returns every hidden state.
`steps` (stream) yields one hidden state at a time and never holds more: the paper's Computational Simplification.
Both evaluate a step's BN as part of its convolution when no batch statistics are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import flop_registry, register_flop_formula

from recnets.ops.compiler import traced
from recnets.ops.norm import Norm

JOINT_PIXELS = 1
"""In inference [x_i, h_{i-1}] are convolved as one from this many pixels for each of k·k·s_out on."""


ONEDNN_MACS = 2_400_000
"""From so many multiply-adds on oneDNN convolves a single map faster than a product of columns does."""


class Recurrence(NamedTuple):
    """The settings of a CRC layer that are not tensors."""

    d: int
    nonlinearity: str = "separate_bn_relu"
    recurrent: bool = True
    padding_mode: str = "zeros"


def apart(x: Tensor, segments: int) -> Tensor:
    """(N, C, H, W) -> (segments · N, C / segments, H, W): the maps of one segment after those of the other."""
    if segments == 1:
        return x
    maps = x.unflatten(1, (segments, -1)).transpose(0, 1).flatten(0, 1)
    return maps.contiguous(memory_format=torch.channels_last)


def together(x: Tensor, segments: int) -> Tensor:
    """The inverse of `apart`."""
    if segments == 1:
        return x
    return x.unflatten(0, (segments, -1)).transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding_mode: str = "zeros") -> Tensor:
    """'Same' convolution, (N, C_in, H, W) with (C_out, C_in, k, k) -> (N, C_out, H, W)."""
    radius = weight.shape[-1] // 2
    if padding_mode == "zeros" or radius == 0:
        return F.conv2d(x, weight, bias, padding=radius)
    return F.conv2d(F.pad(x, (radius, radius, radius, radius), mode=padding_mode), weight, bias)


def infer_conv(x: Tensor, weight: Tensor, padding_mode: str) -> Tensor:
    """`conv` in inference, without a bias, on a CPU by oneDNN where that is worth its while.

    Of a single small map PyTorch would copy the k·k neighbours of every pixel side by side, for a matrix product. That
    is faster for the smallest, but k·k·s_out channels are about as much as all the states that streaming does without.
    """
    large = x.numel() * weight.numel() > ONEDNN_MACS * x.shape[1]
    if large and padding_mode == "zeros" and onednn_takes(x, weight):
        radius = weight.shape[-1] // 2
        return torch.mkldnn_convolution(x, weight, None, (radius, radius), (1, 1), (1, 1), 1)
    return conv(x, weight, None, padding_mode)


def onednn_takes(*tensors: Tensor) -> bool:
    """May these go to an operator of oneDNN? Ordinary float32 on a CPU, and no autocast or compiler looking on."""
    for t in tensors:
        if type(t) not in (Tensor, Parameter) or t.device.type != "cpu" or t.dtype != torch.float32:
            return False
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def count_flops_of(operator: Any) -> None:
    """Let FlopCounterMode count an operator like a convolution: 2 a multiply-add. It knows convolutions by one name."""

    def flops(x: torch.Size, weight: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
        return 2 * out_shape.numel() * weight[1:].numel()

    if operator not in flop_registry:
        register_flop_formula(operator)(flops)


count_flops_of(torch.ops.aten.mkldnn_convolution)


def step_norm(norm: Norm | None, i: int, s_out: int) -> Norm | None:
    """The norm of step i: its slice of d·s_out channels, or the whole where it is shared."""
    if norm is None:
        return None
    channels = norm.weight if norm.weight is not None else norm.mean
    if channels is None or channels.shape[0] == s_out:
        return norm
    return norm.channels(i * s_out, (i + 1) * s_out)


def sigma(z: Tensor, norm: Norm | None) -> Tensor:
    """σ_i of Eq. 3: BN (if any), then ReLU, in place on what no one else holds."""
    if norm is None:
        return torch.relu(z)
    return norm.apply(z).relu_()


def _foldable(norm: Norm | None, nonlinearity: str) -> bool:
    """May a step's BN become part of its convolution? In evaluation, and unless the recursion is linear."""
    return norm is not None and not norm.batch_statistics and nonlinearity != "linear"


def step_affines(norm: Norm, r: Recurrence, s_out: int) -> list[tuple[Tensor, Tensor]]:
    """In evaluation: (scale, shift) of every step, each (s_out, 1, 1), from one computation for all."""
    scale, shift = norm.affine()
    if scale.shape[0] == s_out:  # one norm for all steps, or one step
        return [(scale[:, None, None], shift[:, None, None])] * r.d
    parts = (t.view(r.d, s_out, 1, 1).unbind(0) for t in (scale, shift))
    return list(zip(*parts, strict=True))


def crc(x: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor | None, norm: Norm | None, r: Recurrence) -> Tensor:
    """All hidden states, (N, d·s_in, H, W) -> (N, d·s_out, H, W); see `recnets.ops.naive.crc`."""
    n, _, height, width = x.shape
    s_out, s_in = weight_x.shape[:2]
    in_place = r.recurrent and _foldable(norm, r.nonlinearity) and not torch.is_grad_enabled()
    in_place = in_place and not torch.jit.is_tracing()  # what is traced is run with gradients and without
    if in_place or traced():
        # Planes, not pixels, lie together in the result, which the x-part then becomes. An exported graph chooses its
        # own order, and channels-last strides would tie it to the sides of the example.
        weight_x, weight_h = weight_x.contiguous(), weight_h.contiguous()
    segments = x.reshape(n * r.d, s_in, height, width)
    xw = conv(segments, weight_x, None if not r.recurrent else bias, r.padding_mode)
    if not r.recurrent:
        z = conv(xw, weight_h, bias, r.padding_mode).reshape(n, r.d * s_out, height, width)
        if norm is None or r.nonlinearity != "shared_bn_relu":
            return sigma(z, norm)
        return torch.cat([sigma(z_i, norm) for z_i in z.chunk(r.d, dim=1)], dim=1)
    # One hidden state an index of the second dimension.
    xw = xw.reshape(n, r.d, s_out, height, width)
    if in_place and norm is not None:
        return _crc_folded_(xw, weight_h, norm, r)
    hidden: list[Tensor] = []
    h: Tensor | None = None
    for i in range(r.d):
        z = xw[:, i] if h is None else xw[:, i] + conv(h, weight_h, None, r.padding_mode)
        activated = sigma(z, step_norm(norm, i, s_out))
        h = z if r.nonlinearity == "linear" else activated
        hidden.append(activated)
    return torch.cat(hidden, dim=1)


def _crc_folded_(xw: Tensor, weight_h: Tensor, norm: Norm, r: Recurrence) -> Tensor:
    """Inference: the x-part (N, d, s_out, H, W) becomes the output in place, one convolution a step."""
    n, _, s_out, height, width = xw.shape
    for i, (scale, shift) in enumerate(step_affines(norm, r, s_out)):
        z = xw[:, i]
        if i > 0:
            z.add_(conv(xw[:, i - 1], weight_h, None, r.padding_mode))
        z.mul_(scale).add_(shift).relu_()
    return xw.reshape(n, r.d * s_out, height, width)


def steps(
    x: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    r: Recurrence,
    *,
    overwrite: bool = False,
) -> Iterator[Tensor]:
    """The hidden states one at a time, each (N, s_out, H, W) in channels-last order.

    A step is one convolution of [x_i, h_{i-1}] with [W_x, W_h] (two where the kernels differ in size), its BN
    multiplied into the weights in evaluation: nothing d·s_out wide is ever made. With `overwrite` (inference only) a
    state is valid until the next is asked for, which may be written over it.
    """
    s_out, s_in = weight_x.shape[:2]
    joint = r.recurrent and weight_x.shape[-1] == weight_h.shape[-1]
    if overwrite and joint and norm is not None and _foldable(norm, r.nonlinearity):
        yield from _steps_overwritten(x, weight_x, weight_h, norm, r)
        return
    weight_xh = torch.cat([weight_x, weight_h], dim=1) if joint else weight_x
    fold = _foldable(norm, r.nonlinearity)
    h: Tensor | None = None
    for i in range(r.d):
        x_i = x[:, i * s_in : (i + 1) * s_in].contiguous(memory_format=torch.channels_last)
        own = step_norm(norm, i, s_out)
        scale, shift = own.affine() if fold and own is not None else (None, bias)

        def scaled(weight: Tensor, scale: Tensor | None = scale) -> Tensor:
            return weight if scale is None else weight * scale[:, None, None, None].to(weight.dtype)

        if not r.recurrent:
            z = conv(conv(x_i, weight_x, None, r.padding_mode), scaled(weight_h), shift, r.padding_mode)
        elif h is None:
            z = conv(x_i, scaled(weight_x), shift, r.padding_mode)
        elif joint:
            xh = torch.cat([x_i, h], dim=1)
            del x_i, h
            z = conv(xh, scaled(weight_xh), shift, r.padding_mode)
            del xh
        else:
            z = conv(x_i, scaled(weight_x), shift, r.padding_mode)
            z += conv(h, scaled(weight_h), None, r.padding_mode)
        if r.nonlinearity == "linear":
            h = z
            yield sigma(z, own)
        else:
            h = z.relu_() if fold else sigma(z, own)
            yield h


def _steps_overwritten(x: Tensor, weight_x: Tensor, weight_h: Tensor, norm: Norm, r: Recurrence) -> Iterator[Tensor]:
    """`steps` in evaluation, every state written over the last: h_i = relu(s_i·([x_i, h_{i-1}] ⊛ [W_x, W_h]) + t_i).

    One convolution of [x_i, h_{i-1}] needs [W_x, W_h] side by side. On small maps that copy of the weights would be
    the largest tensor of all, so there the two are convolved apart.
    """
    n, _, height, width = x.shape
    s_out, s_in, k, _ = weight_x.shape
    joint = n * height * width >= JOINT_PIXELS * s_out * k * k
    x_0, *segments = x.split(s_in, dim=1)
    (scale, shift), *affines = step_affines(norm, r, s_out)
    z = infer_conv(x_0, weight_x, r.padding_mode).contiguous(memory_format=torch.channels_last)
    if not joint:
        yield torch.addcmul(shift, z, scale, out=z).relu_()
        for x_i, (scale, shift) in zip(segments, affines, strict=True):
            h, z = z, infer_conv(z, weight_h, r.padding_mode)
            del h  # freed before the part of x is made
            z += infer_conv(x_i, weight_x, r.padding_mode)
            yield torch.addcmul(shift, z, scale, out=z).relu_()
        return
    # In the type of z, which autocast may have chosen.
    weight_xh = torch.cat([weight_x, weight_h], dim=1).to(z.dtype)
    xh = z.new_empty(n, height, width, s_in + s_out).permute(0, 3, 1, 2)
    place, h = xh.split([s_in, s_out], dim=1)
    torch.addcmul(shift, z, scale, out=h).relu_()
    del z  # it would stay alive while the state is used
    yield h
    for x_i, (scale, shift) in zip(segments, affines, strict=True):
        place.copy_(x_i)
        torch.addcmul(shift, infer_conv(xh, weight_xh, r.padding_mode), scale, out=h).relu_()
        yield h
