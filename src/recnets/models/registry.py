"""Models by name, as in timm: `create_model`, `list_models`, and a decorator that registers one in a few lines."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
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
    name: str,
    *,
    num_classes: int | None = None,
    in_channels: int | None = None,
    pretrained: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Build a model by its registered name, its title in the paper, the paper's notation or a published name.

    Args:
        name: "recnet_60_1280", "RecNet-60-1280", "RecNet(4, 8, 16, 32, 10, 10, 10)", or "ARCH.TAG" as
            `recnets.models.published` lists them.
        num_classes: outputs of the classifier; 0 leaves the classifier out. By default 10, or those of the
            pretrained weights. With pretrained weights for another number, all but the classifier is loaded.
        in_channels: channels of the pictures. By default 3, or those of the pretrained weights.
        pretrained: load published weights: those of the tag, or the only ones there are of this architecture.
        **overrides: hyper-parameters that differ, e.g. e=2, nonlinearity="relu", head="hidden", recurrent=False.
    """
    if not isinstance(name, str):
        raise TypeError(f"a model's name must be a str, got {type(name).__name__}")
    if num_classes is not None:
        positive_int(num_classes, "num_classes", minimum=0)
    if in_channels is not None:
        positive_int(in_channels, "in_channels")
    if pretrained or "." in name:
        return _from_published(name, num_classes, in_channels, overrides, load=pretrained)
    classes = 10 if num_classes is None else num_classes
    return _build(name, classes, 3 if in_channels is None else in_channels, overrides)


def _build(name: str, num_classes: int, in_channels: int, overrides: dict[str, Any]) -> nn.Module:
    """An untrained model that carries its configuration."""
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


def kept_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What stays true of weights when their classifier is replaced."""
    return {key: metadata[key] for key in ("normalisation", "image_size") if key in metadata}


def _from_published(
    name: str, num_classes: int | None, in_channels: int | None, overrides: dict[str, Any], *, load: bool
) -> nn.Module:
    """The model of published weights, with the changes asked for where the weights allow them."""
    from recnets.models import weights  # which stands on this file

    config, tensors, path = weights.read_weights(_published_name(name, weights.published()))
    classes = config.num_classes if num_classes is None else num_classes
    channels = config.in_channels if in_channels is None else in_channels
    if load and channels != config.in_channels:
        raise ValueError(f"the weights {name!r} are for in_channels={config.in_channels}, got {channels}")
    model = _build(config.name, classes, channels, {**config.overrides, **overrides})
    if load:
        skip = ("classifier.",) if classes != config.num_classes else ()
        weights.load_tensors(model, tensors, path, skip=skip)
        metadata = weights.read_metadata(path)
        model.metadata = kept_metadata(metadata) if skip else metadata  # type: ignore[assignment]
    return model


def _published_name(name: str, published: list[str]) -> str:
    """The published weights that a name with or without a tag means."""
    arch, dot, tag = name.partition(".")
    arch = canonical_name(arch)
    matches = [p for p in published if p == f"{arch}.{tag}" or (not dot and p.startswith(f"{arch}."))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"several weights are published for {name!r}, choose one: {', '.join(matches)}")
    if arch not in _BUILDERS and not _NOTATION.match(name):
        raise ValueError(unknown_model(name))
    known = f"published: {', '.join(published)}" if published else "none are in this version"
    raise ValueError(
        f"no weights are published for {name!r}{did_you_mean(name, published)} ({known}); "
        f"create_model({arch!r}) builds the model untrained"
    )


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
