"""What layers.py times, built and run in processes of their own, which import this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from recnets import create_model
from recnets.layers import Recurrent
from recnets.models.plain import as_plain_modules

WAYS = ("naive", "concat", "stream")


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
        return as_plain_modules(part).train(train)
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
