"""Models by name, as in timm: `create_model`, `list_models`, and a decorator that registers one in a few lines."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from recnets.utils import did_you_mean, positive_int

Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a registered model beside its code."""

    name: str
    title: str
    family: str
    paper_params: str | None = None
    note: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build a model again; every created model carries it as `model.config`."""

    name: str
    num_classes: int = 10
    in_channels: int = 3
    overrides: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """A fresh model of this configuration."""
        return create_model(self.name, num_classes=self.num_classes, in_channels=self.in_channels, **self.overrides)


_BUILDERS: dict[str, Builder] = {}
_INFO: dict[str, ModelInfo] = {}
_NOTATION = re.compile(r"^\s*RecNet\s*\(([^()]*)\)\s*$", re.IGNORECASE)


def register_model(
    *, title: str, family: str, paper_params: str | None = None, note: str = ""
) -> Callable[[Builder], Builder]:
    """Register `def NAME(**kwargs) -> nn.Module`; kwargs hold num_classes, in_channels and the overrides."""

    def decorator(builder: Builder) -> Builder:
        name = builder.__name__
        if name in _BUILDERS:
            raise ValueError(f"a model named {name!r} is registered already")
        _BUILDERS[name] = builder
        _INFO[name] = ModelInfo(name, title, family, paper_params, note)
        return builder

    return decorator


def list_models(pattern: str = "*") -> list[str]:
    """Registered names that match a shell pattern, in the order of the paper's tables."""
    return fnmatch.filter(_BUILDERS, pattern)


def model_info(name: str) -> ModelInfo:
    """The record of a registered name; ValueError with near names otherwise."""
    if name not in _INFO:
        raise ValueError(unknown_model(name))
    return _INFO[name]


def unknown_model(name: str) -> str:
    """The message for a name that is not registered."""
    return (
        f"unknown model {name!r}{did_you_mean(name, [*_BUILDERS, *(i.title for i in _INFO.values())])} "
        "(`recnet list` shows all; the paper's notation works too: 'RecNet(4, 8, 16, 32, 10, 10, 10)')"
    )


def canonical_name(name: str) -> str:
    """The registered name for a name or a title of the paper ("RecNet-60-1280"); others come back as they are."""
    lowered = name.strip().lower()
    by_title = {info.title.lower(): info.name for info in _INFO.values()}
    return lowered if lowered in _BUILDERS else by_title.get(lowered, name)


def create_model(
    name: str, *, num_classes: int = 10, in_channels: int = 3, pretrained: bool = False, **overrides: Any
) -> nn.Module:
    """Build a model by its registered name, its title in the paper, or the paper's notation.

    Args:
        name: "recnet_60_1280", "RecNet-60-1280" or "RecNet(4, 8, 16, 32, 10, 10, 10)".
        num_classes: outputs of the classifier; 0 leaves the classifier out.
        in_channels: channels of the pictures.
        pretrained: load published weights; the name then says which, "recnet_60_480.cifar100".
        **overrides: hyper-parameters that differ, e.g. e=2, nonlinearity="relu", head="hidden", recurrent=False.
    """
    if not isinstance(name, str):
        raise TypeError(f"a model's name must be a str, got {type(name).__name__}")
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
        raise ValueError(f"num_classes must be an int of at least 0, got {num_classes!r}")
    positive_int(in_channels, "in_channels")
    if pretrained:
        raise ValueError(f"no weights are published for {name!r} in this version; pretrained=False builds it untrained")
    notation = _NOTATION.match(name)
    if notation:
        model = _from_notation(name, notation.group(1), num_classes, in_channels, overrides)
    else:
        name = canonical_name(name)
        if name not in _BUILDERS:
            raise ValueError(unknown_model(name))
        model = _BUILDERS[name](num_classes=num_classes, in_channels=in_channels, **overrides)
    model.config = ModelConfig(name, num_classes, in_channels, overrides)  # type: ignore[assignment]
    return model


def _from_notation(
    name: str, arguments: str, num_classes: int, in_channels: int, overrides: dict[str, Any]
) -> nn.Module:
    """RecNet(e, S_1 … S_n, d_1 … d_n)."""
    from recnets.models.recnet import RecNet

    try:
        numbers = [int(part) for part in arguments.split(",")]
    except ValueError:
        raise ValueError(
            f"the paper's notation holds integers, as in 'RecNet(4, 8, 16, 32, 10, 10, 10)', got {name!r}"
        ) from None
    if len(numbers) < 3 or len(numbers) % 2 == 0:
        raise ValueError(
            f"the paper's notation is RecNet(e, S_1 … S_n, d_1 … d_n): an odd count of at least 3 numbers, "
            f"got {len(numbers)} in {name!r}"
        )
    stages = len(numbers) // 2
    settings: dict[str, Any] = {
        "e": numbers[0],
        "s": tuple(numbers[1 : 1 + stages]),
        "d": tuple(numbers[1 + stages :]),
    }
    return RecNet(num_classes=num_classes, in_channels=in_channels, **{**settings, **overrides})
