"""RecNets as anyone would write them, a module for every convolution and norm: what benchmarks compare with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent


class NaiveRecurrent(nn.Module):
    """A Recurrent module ("separate_bn_relu", zero padding) written with PyTorch's own modules, one call a step."""

    def __init__(self, source: Recurrent) -> None:
        super().__init__()
        crc = source.crc
        self.d = crc.d
        (s_out, s_in, kx, _), kh = crc.weight_x.shape, crc.weight_h.shape[-1]
        self.conv_x = nn.Conv2d(s_in, s_out, kx, padding=kx // 2, bias=False)
        self.conv_h = nn.Conv2d(s_out, s_out, kh, padding=kh // 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(s_out) for _ in range(crc.d))
        self.transition = copy.deepcopy(source.transition)
        with torch.no_grad():
            # in the memory order of nn.Conv2d; the library's own is that of streaming
            self.transition.conv.weight = nn.Parameter(source.transition.conv.weight.contiguous())
            self.conv_x.weight.copy_(crc.weight_x)
            self.conv_h.weight.copy_(crc.weight_h)
            for i, norm in enumerate(self.norms):
                for name in ("weight", "bias", "running_mean", "running_var"):
                    getattr(norm, name).copy_(getattr(crc.norm, name)[i * s_out : (i + 1) * s_out])

    def forward(self, x: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for x_i, norm in zip(x.chunk(self.d, dim=1), self.norms, strict=True):
            z = self.conv_x(x_i)
            if hidden:
                z = z + self.conv_h(hidden[-1])
            hidden.append(torch.relu(norm(z)))
        return self.transition(torch.cat(hidden, dim=1))


def as_modules(model: nn.Module) -> nn.Module:
    """The network with every Recurrent module replaced by its naive form, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Recurrent):
            model.set_submodule(name, NaiveRecurrent(module))
    return model
