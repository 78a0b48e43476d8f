"""Batch normalisation as data and functions, so that a step can use its own slice of one set of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recnets.ops.compiler import exporting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = Any


class Norm(NamedTuple):
    """What `F.batch_norm` needs, for C channels; `group` synchronises the statistics over processes."""

    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    batch_statistics: bool
    momentum: float
    eps: float
    group: ProcessGroup | None = None

    def channels(self, start: int, stop: int) -> Norm:
        """The norm of channels start..stop; running statistics stay views, so updates reach the whole."""

        def part(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[start:stop]

        return self._replace(mean=part(self.mean), var=part(self.var), weight=part(self.weight), bias=part(self.bias))

    def in_float32(self) -> Norm:
        """The same with its tensors in float32."""

        def cast(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.float()

        return self._replace(mean=cast(self.mean), var=cast(self.var), weight=cast(self.weight), bias=cast(self.bias))

    def apply(self, z: Tensor) -> Tensor:
        """(N, C, H, W) -> the same shape, normalised; running statistics move in place in training."""
        if self.batch_statistics and self.group is not None:
            return _sync_batch_norm(z, self)
        compiling = torch.compiler.is_compiling() and not exporting()  # what is exported keeps its norms, to be folded
        if not self.batch_statistics and compiling and torch.is_grad_enabled():
            # On CUDA the gradient of a frozen F.batch_norm comes in NCHW order, whatever z's; compilers expect z's.
            scale, shift = (self.in_float32() if z.dtype.itemsize == 2 else self).affine()
            return (z * scale[:, None, None] + shift[:, None, None]).to(z.dtype)
        return F.batch_norm(
            z, self.mean, self.var, self.weight, self.bias, self.batch_statistics, self.momentum, self.eps
        )

    def affine(self) -> tuple[Tensor, Tensor]:
        """In evaluation a norm is z·scale + shift: the two vectors (C)."""
        assert self.mean is not None
        assert self.var is not None
        scale = torch.rsqrt(self.var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        if self.bias is None:
            return scale, -self.mean * scale
        return scale, torch.addcmul(self.bias, self.mean, scale, value=-1)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the processes of a group; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def _sync_batch_norm(z: Tensor, norm: Norm) -> Tensor:
    """Batch normalisation over the pixels of all processes of `norm.group`, differentiable, on any device.

    Counts may differ from process to process. The mean comes first and the variance is of the centred values: the
    one-pass E[z²]-E[z]² would lose digits.
    """

    def all_reduce(x: Tensor) -> Tensor:
        return _Sum.apply(x, norm.group)

    z32 = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    local = z32.sum(dim=(0, 2, 3))
    count = local.new_tensor([z.shape[0] * z.shape[2] * z.shape[3]])
    total = all_reduce(torch.cat([local, count]))
    n = total[-1].detach()
    mean = total[:-1] / n
    centred = z32 - mean[:, None, None]
    var = all_reduce(centred.square().sum(dim=(0, 2, 3))) / n
    if norm.mean is not None and norm.var is not None:
        with torch.no_grad():
            norm.mean.lerp_(mean.to(norm.mean.dtype), norm.momentum)
            norm.var.lerp_((var * (n / (n - 1).clamp_min(1))).to(norm.var.dtype), norm.momentum)
    out = centred * torch.rsqrt(var + norm.eps)[:, None, None]
    if norm.weight is not None:
        out = out * norm.weight[:, None, None]
    if norm.bias is not None:
        out = out + norm.bias[:, None, None]
    return out.to(z.dtype)
