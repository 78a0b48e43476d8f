"""RecNets as anyone would write them at first, their layers by PyTorch's own modules: what speed is compared with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent


class PlainRecurrent(nn.Module):
    """A Recurrent module in PyTorch's own modules.

    A Conv2d pair, an addition, a BatchNorm2d and a ReLU a step; then cat and the transition.
    """

    def __init__(self, module: Recurrent) -> None:
        super().__init__()
        crc = module.crc
        if crc.nonlinearity != "separate_bn_relu" or not crc.recurrent or crc.padding_mode != "zeros":
            raise ValueError(f"only the paper's recurrence is written in plain modules, got {crc!r}")
        assert crc.norm is not None
        self.conv_x, self.conv_h = (self._conv(weight) for weight in (crc.weight_x, crc.weight_h))
        eps, momentum = crc.norm.eps, crc.norm.momentum
        self.norms = nn.ModuleList(nn.BatchNorm2d(crc.s_out, eps, momentum) for _ in range(crc.d))
        for name in ("weight", "bias", "running_mean", "running_var"):
            for norm, part in zip(self.norms, getattr(crc.norm, name).detach().split(crc.s_out), strict=True):
                getattr(norm, name).data.copy_(part)
        self.relu = nn.ReLU()
        self.transition = copy.deepcopy(module.transition)
        self.transition.backend = "torch"
        # in nn.Conv2d's own memory order; the library's is that of streaming
        self.transition.conv.weight = nn.Parameter(module.transition.conv.weight.detach().contiguous())
        self.to(crc.weight_x)

    @staticmethod
    def _conv(weight: Tensor) -> nn.Conv2d:
        size = weight.shape[-1]
        conv = nn.Conv2d(weight.shape[1], weight.shape[0], size, padding=size // 2, bias=False)
        conv.weight.data.copy_(weight.detach())
        return conv

    def forward(self, x: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for x_i, norm in zip(x.chunk(len(self.norms), dim=1), self.norms, strict=True):
            z = self.conv_x(x_i)
            if hidden:
                z = z + self.conv_h(hidden[-1])
            hidden.append(self.relu(norm(z)))
        return self.transition(torch.cat(hidden, dim=1))


def as_plain_modules(model: nn.Module) -> nn.Module:
    """A copy of `model`, its Recurrent modules written in plain modules."""
    written = copy.deepcopy(model)
    for name, module in list(written.named_modules()):
        if isinstance(module, Recurrent):
            written.set_submodule(name, PlainRecurrent(module).train(module.training))
    return written
