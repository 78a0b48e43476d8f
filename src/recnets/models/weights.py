"""Weights files: safetensors whose metadata say which model they belong to and how they were made.

A file alone is enough to build its model again. Metadata values are JSON; the keys that every writer may use are
model, dataset, classes, normalisation, image_size, accuracy, recipe, seed, epoch, command, commit and versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recnets.errors import Misuse, RecNetsError
from recnets.models.registry import ModelConfig
from recnets.utils import atomic_write, did_you_mean, image_sides

FORMAT = "recnets"
SUFFIX = ".safetensors"
RUN_WEIGHTS = f"last{SUFFIX}"
HUB_WEIGHTS = f"model{SUFFIX}"  # in a folder that `RecNet.save_pretrained` wrote
PUBLISHED_FOLDER = Path(__file__).resolve().parents[1] / "weights"
# How a model is computed belongs to the machine that runs it, not to the file.
MACHINE_OVERRIDES = ("backend", "mode")


def published() -> list[str]:
    """Names of the weights that come with the package, "ARCH.TAG", as `load_weights` and `create_model` take them."""
    return sorted(path.name.removesuffix(SUFFIX) for path in PUBLISHED_FOLDER.glob(f"*.*{SUFFIX}"))


def config_of(model: nn.Module) -> ModelConfig:
    """The configuration of a created model as it is now: `reset_classifier` may have changed the classes since."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"this {type(model).__name__} carries no ModelConfig, so a file could not say how to build it again; "
            "make it with create_model(...), which also takes the paper's notation 'RecNet(4, 8, 16, 32, 10, 10, 10)'"
        )
    return replace(config, num_classes=getattr(model, "num_classes", config.num_classes))


def check_classes(num_classes: int, metadata: Mapping[str, Any]) -> None:
    """A ValueError if the metadata name classes, but not one for each output of the classifier, where there is one."""
    classes = metadata.get("classes")
    if classes is None or num_classes == 0:
        return
    if not isinstance(classes, list | tuple):
        raise ValueError(f"the metadata's classes must be a list of names, got {classes!r}")
    if len(classes) != num_classes:
        raise ValueError(f"the metadata name {len(classes)} classes, the model has num_classes={num_classes}")


def image_size_of(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(height, width) of the pictures that weights were trained on; CIFAR's where the metadata do not say."""
    return image_sides(metadata.get("image_size") or 32)


def save_weights(
    path: Path | str, model: nn.Module, metadata: Mapping[str, Any], *, dtype: torch.dtype | None = None
) -> None:
    """Write the model's parameters and buffers with `metadata`, whole or not at all.

    Adds "format", "model" (the configuration) and "parameters" (their number). A model wrapped by
    DistributedDataParallel or torch.compile is saved as the model inside. `dtype` stores floating point tensors in
    that type, e.g. torch.float16 for half the size; loading casts them back to float32.
    """
    model = _unwrapped(model)
    own = config_of(model)
    check_classes(own.num_classes, metadata)
    config = asdict(own)
    config["overrides"] = {k: v for k, v in config["overrides"].items() if k not in MACHINE_OVERRIDES}
    values = {**metadata, "model": config, "parameters": sum(p.numel() for p in model.parameters())}
    header = {key: _to_json(key, value) for key, value in values.items()} | {"format": FORMAT}
    tensors = {name: _stored(name, tensor, dtype) for name, tensor in model.state_dict().items()}
    atomic_write(path, safetensors.torch.save(tensors, header))


def read_metadata(path_or_name: Path | str) -> dict[str, Any]:
    """The metadata of a weights file, run folder or published name, decoded; "model" is the configuration's dict."""
    return _read(_resolve(path_or_name), tensors=False)[0]


def load_weights(path_or_name: Path | str) -> tuple[nn.Module, dict[str, Any]]:
    """(the model in evaluation mode, the metadata) of a weights file, a run folder or a published name.

    A folder that `RecNet.save_pretrained` wrote will do too. The model carries the metadata as `model.metadata`.
    """
    path = _resolve(path_or_name)
    metadata, tensors = _read(path)
    config = model_config(path, metadata)
    try:
        check_classes(config.num_classes, metadata)
    except ValueError as error:
        raise RecNetsError(f"{path} contradicts itself: {error}") from error
    model = config.build()
    load_tensors(model, tensors, path)
    model.metadata = metadata  # type: ignore[assignment]
    return model.eval(), metadata


def read_weights(path_or_name: Path | str) -> tuple[ModelConfig, dict[str, Tensor], Path]:
    """The configuration, the tensors and the path: for those who build a model that differs from the file's."""
    path = _resolve(path_or_name)
    metadata, tensors = _read(path)
    return model_config(path, metadata), tensors, path


def model_config(path: Path, metadata: Mapping[str, Any]) -> ModelConfig:
    """The "model" entry as a ModelConfig; JSON's lists become tuples again."""
    try:
        config = dict(metadata["model"])
        overrides = {k: tuple(v) if isinstance(v, list) else v for k, v in config.pop("overrides", {}).items()}
        return ModelConfig(**config, overrides=overrides)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecNetsError(f"{path} does not say how to build its model ({type(error).__name__}: {error})") from error


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, *, skip: Iterable[str] = (), what: str = "the model"
) -> None:
    """Copy a file's tensors into `model`, which must have the same names and shapes but for the prefixes of `skip`."""
    prefixes = tuple(skip)
    given = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)} if prefixes else tensors
    own = {name: t for name, t in model.state_dict().items() if not (prefixes and name.startswith(prefixes))}
    problems = [
        _named("misses", [name for name in own if name not in given]),
        _named("has what the model lacks,", [name for name in given if name not in own]),
        _named(
            "has the wrong shape for",
            [
                f"{name} ({tuple(given[name].shape)}, expected {tuple(own[name].shape)})"
                for name in own
                if name in given and own[name].shape != given[name].shape
            ],
        ),
    ]
    if any(problems):
        raise RecNetsError(f"{path} does not fit {what}: it " + "; it ".join(p for p in problems if p))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])


def _named(what: str, names: list[str], limit: int = 4) -> str:
    """`"misses a, b and 7 more"`, or nothing for no names."""
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{what} {', '.join(names[:limit])}{more}"


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile, whose names carry no prefix."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _to_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata must be JSON, {key!r} is not: {error}") from error


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy on the CPU that shares memory with no other: safetensors refuses tied and overlapping tensors."""
    stored = tensor.detach().to("cpu", copy=True).contiguous()
    if dtype is None or not stored.is_floating_point():
        return stored
    cast = stored.to(dtype)
    if bool((torch.isfinite(stored) & ~torch.isfinite(cast)).any()):
        raise ValueError(f"{name} holds {stored.abs().max().item():g}, which is too large for {dtype}")
    return cast


def _resolve(path_or_name: Path | str) -> Path:
    """The file meant by a path, a run folder or a published name."""
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        for name in (RUN_WEIGHTS, HUB_WEIGHTS):
            if (path / name).is_file():
                return path / name
        raise RecNetsError(
            f"the folder {path} holds no {RUN_WEIGHTS} (a run) and no {HUB_WEIGHTS} (from save_pretrained); "
            "give such a folder or a weights file"
        )
    if path.exists():
        return path
    name = str(path_or_name)
    names = published()
    if name in names:
        return PUBLISHED_FOLDER / f"{name}{SUFFIX}"
    known = f"published weights: {', '.join(names)}" if names else "no weights are published in this version"
    raise Misuse(f"{name!r} is neither a weights file nor a run folder{did_you_mean(name, names)} ({known})")


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(decoded metadata, tensors by name) of a file that `save_weights` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118
    except SafetensorError as error:
        raise RecNetsError(f"{path} is not a safetensors file, or it is cut short or damaged ({error})") from error
    except OSError as error:
        raise RecNetsError(f"cannot read {path}: {error.strerror or error}") from error
    if header.get("format") != FORMAT:
        raise RecNetsError(
            f"{path} was not written by recnets: its metadata have format {header.get('format')!r}, expected {FORMAT!r}"
        )
    try:
        return {key: value if key == "format" else json.loads(value) for key, value in header.items()}, found
    except ValueError as error:
        raise RecNetsError(f"the metadata of {path} are not JSON: {error}") from error
