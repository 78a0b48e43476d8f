"""Models with the statistics of trained ones: BN that moved, some of its weights negative, some dead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from recnets import create_model


def settle(model: nn.Module, dead: float = 0.0) -> nn.Module:
    """Move every BN as training would; a `dead` share of BN weights becomes zero, 2 % of the rest negative."""
    generator = torch.Generator().manual_seed(1)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.empty_like(like).uniform_(low, high, generator=generator)

    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            weight = uniform(module.weight, 0.2, 1.0)
            chance = uniform(module.weight, 0.0, 1.0)
            weight = torch.where(chance < 0.02, -weight, weight)
            weight = torch.where(chance > 1 - dead, torch.zeros(()), weight)
            module.weight.data.copy_(weight)
            module.bias.data.copy_(uniform(weight, -0.4, 0.4))
            module.running_mean.copy_(uniform(weight, -0.5, 0.5))
            module.running_var.copy_(uniform(weight, 0.5, 2.0))
    return model.eval()


@pytest.fixture
def trained() -> Callable[..., nn.Module]:
    """`trained(name, dead=0.1, **overrides)`: a model as training leaves it, in evaluation mode."""

    def build(name: str = "RecNet(2, 4, 4, 4, 2, 3, 2)", *, dead: float = 0.0, **overrides: object) -> nn.Module:
        torch.manual_seed(0)
        return settle(create_model(name, **overrides), dead)

    return build


@pytest.fixture
def snapshot() -> Callable[[nn.Module], dict[str, object]]:
    """`snapshot(model)`: every mode, gradient flag, value and number of hooks, to compare before and after."""

    def take(model: nn.Module) -> dict[str, object]:
        modules = {name: (m.training, len(m._forward_hooks)) for name, m in model.named_modules()}
        gradients = {name: p.requires_grad for name, p in model.named_parameters()}
        values = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        return {"modules": modules, "gradients": gradients, "values": values}

    return take
