"""What a row's network costs, without building its weights: parameters and multiply-adds for one picture."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recnets.layers import Recurrent
from recnets.models import create_model

# classes, channels, side of a picture
SHAPES = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "digits": (10, 1, 8)}


class Cost(NamedTuple):
    parameters: int
    macs: int


def build(model: str, overrides: Mapping[str, Any], dataset: str, device: str = "meta") -> nn.Module:
    """The network for a data set; on the meta device it has shapes and no weights."""
    classes, channels, _ = SHAPES[dataset]
    with torch.device(device):
        return create_model(model, num_classes=classes, in_channels=channels, **_options(overrides))


def parameters(model: str, overrides: Mapping[str, Any], dataset: str) -> int:
    """Parameters of the network for a data set."""
    return _sizes(model, _key(overrides), dataset)[0]


def cost(model: str, overrides: Mapping[str, Any], dataset: str) -> Cost:
    """Parameters, and multiply-adds (half of what `torch.utils.flop_counter` counts) for one picture."""
    count, classifier = _sizes(model, _key(overrides), dataset)
    _, channels, side = SHAPES[dataset]
    return Cost(count, _macs_below_classifier(model, _key(overrides), channels, side) + classifier)


def _key(overrides: Mapping[str, Any]) -> str:
    return json.dumps(dict(overrides), sort_keys=True)


@functools.cache
def _sizes(model: str, overrides: str, dataset: str) -> tuple[int, int]:
    """Parameters, and the classifier's multiply-adds (no network has linear layers elsewhere)."""
    network = build(model, json.loads(overrides), dataset)
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    return sum(p.numel() for p in network.parameters()), sum(m.in_features * m.out_features for m in linear)


@functools.cache
def _macs_below_classifier(model: str, overrides: str, channels: int, side: int) -> int:
    """Counting takes a second for a deep network and is the same for 10 and 100 classes, so the classifier is apart."""
    with torch.device("meta"):
        network = create_model(model, num_classes=0, in_channels=channels, **_options(json.loads(overrides))).eval()
    for module in network.modules():
        if isinstance(module, Recurrent):
            module.mode = "concat"  # stream mode adds up with operators that the counter does not know
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.empty(1, channels, side, side, device="meta"))
    return counter.get_total_flops() // 2


def _options(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in overrides.items()}
