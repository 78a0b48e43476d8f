"""The recurrence of a CRC layer as the paper writes it: the specification, any dtype, never optimised.

Everything faster is tested against this page, output and every gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv(x: Tensor, weight: Tensor, padding_mode: str = "zeros") -> Tensor:
    """The paper's ⊛: a 'same' convolution, (N, C_in, H, W) with (C_out, C_in, k, k) -> (N, C_out, H, W)."""
    radius = weight.shape[-1] // 2
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return F.conv2d(F.pad(x, (radius, radius, radius, radius), mode=mode), weight)


def batch_norm(
    z: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor,
    beta: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalisation of (N, C, H, W) by its definition; in training the running `mean` and `var` move in place."""
    if training:
        batch_mean = z.mean(dim=(0, 2, 3))
        batch_var = z.var(dim=(0, 2, 3), correction=0)
        with torch.no_grad():
            mean.lerp_(batch_mean, momentum)
            var.lerp_(z.var(dim=(0, 2, 3), correction=1), momentum)
        mean, var = batch_mean, batch_var
    scale = gamma / torch.sqrt(var + eps)
    return (z - mean[:, None, None]) * scale[:, None, None] + beta[:, None, None]


def crc(
    x: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    *,
    d: int,
    nonlinearity: str = "separate_bn_relu",
    recurrent: bool = True,
    padding_mode: str = "zeros",
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    decisions: Tensor | None = None,
) -> Tensor:
    """h of Eq. 2 ("relu", "shared_bn_relu"), Eq. 3 ("separate_bn_relu") or Eq. 4 ("linear").

    x (N, d·s_in, H, W), weight_x (s_out, s_in, kx, kx), weight_h (s_out, s_out, kh, kh), bias (s_out) or None, and
    norm = (running mean, running variance, gamma, beta), each (d·s_out), or (s_out) if shared, or None for "relu".
    Returns the hidden states concatenated, (N, d·s_out, H, W). `recurrent=False` is the grouped control of
    Table 1d: no h_{i-1}, and W_h is applied to x_i ⊛ W_x instead. `decisions` (N, d·s_out, H, W), 0 or 1, are taken
    for ReLU's own: next to zero, rounding alone turns some of them, and a gradient shows every one.
    """

    def sigma(i: int, z: Tensor) -> Tensor:
        """σ_i: what follows the sum at step i (for "linear", what follows the recursion)."""
        if norm is not None:
            s_out = weight_x.shape[0]
            own = slice(0, s_out) if nonlinearity == "shared_bn_relu" else slice(i * s_out, (i + 1) * s_out)
            mean, var, gamma, beta = (t[own] for t in norm)
            z = batch_norm(z, mean, var, gamma, beta, training, momentum, eps)
        return torch.relu(z) if decisions is None else z * decisions.chunk(d, dim=1)[i]

    h: Tensor | None = None
    hidden = []
    for i, x_i in enumerate(x.chunk(d, dim=1)):
        z = conv(x_i, weight_x, padding_mode)
        if not recurrent:
            z = conv(z, weight_h, padding_mode)
        elif h is not None:
            z = z + conv(h, weight_h, padding_mode)
        if bias is not None:
            z = z + bias[:, None, None]
        h = z if nonlinearity == "linear" else sigma(i, z)
        hidden.append(sigma(i, h) if nonlinearity == "linear" else h)
    return torch.cat(hidden, dim=1)
