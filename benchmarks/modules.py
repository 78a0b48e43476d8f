"""RecNets as anyone would write them, a module for every convolution and norm: what benchmarks compare with.

Processes of their own import this, so it holds what they build and run too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from recnets import create_model
from recnets.layers import Recurrent

WAYS = ("naive", "concat", "stream")


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


def randomise(model: nn.Module) -> None:
    """Norms as after training, so that a mistake in one of them shows in the outputs."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def network(name: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    model = create_model(name)
    randomise(model)
    return model


def variant(name: str, stage: int | None, way: str, train: bool) -> nn.Module:
    """A network, or the first Recurrent module of one of its stages, as one of `WAYS`."""
    model = network(name)
    part = nn.Sequential(model if stage is None else model.stages[stage][0])  # so that the module can be replaced
    if way == "naive":
        as_modules(part)
    for module in part.modules():
        if isinstance(module, Recurrent):
            module.mode = way
    return part.train(train)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def forward_backward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        model.zero_grad(set_to_none=True)
        out = model(x)
        out.square().mean().backward()
    return out


def runner(name: str, stage: int | None, way: str, train: bool) -> Callable[[Tensor], Tensor]:
    """What is timed, built in the process that runs it."""
    return partial(forward_backward if train else forward, variant(name, stage, way, train))
