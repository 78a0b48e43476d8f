"""The trainer's private state: everything that the next step depends on, in one file, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recnets.data import DataSet
from recnets.errors import RecNetsError
from recnets.training.recipe import Recipe, recipe_changes, recipe_from_dict
from recnets.training.step import TrainStep, momentum_buffers
from recnets.utils import atomic_write

FORMAT = 1


@dataclass
class Position:
    """Where a run stands: `step` steps of epoch `epoch` (from 0) are done."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    """Wall time of all sessions, evaluation included."""
    train_seconds: float = 0.0
    images: int = 0
    """Images trained on in `train_seconds`."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl."""
    best: dict[str, Any] | None = None
    """{"epoch", "accuracy"} of the best epoch on the validation split."""


def fingerprint(data: DataSet) -> str:
    """Identifies the training images, so that a resume with others is noticed."""
    digest = hashlib.sha256(f"{data.name} {data.classes} {tuple(data.train.images.shape)}".encode())
    for tensor in (data.train.labels, data.train.images):
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def pack(step: TrainStep, position: Position, recipe: Recipe, data: str, totals: list[Tensor]) -> dict[str, Any]:
    """Tensors and plain types only. `totals` are the meter's sums over all processes."""
    device = step.device
    return {
        "format": FORMAT,
        "recipe": recipe.to_dict(),
        "data": data,
        "position": asdict(position),
        "model": dict(step.model.state_dict()),
        "momentum": momentum_buffers(step.optimizer),
        "average": [] if step.average is None else step.average.tensors(),
        "meter": totals,
        "scaler": step.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Serialised first, so that trouble with the disk is an OSError of `atomic_write`, which says so clearly."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    atomic_write(path, lambda tmp: tmp.write_bytes(buffer.getbuffer()))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The packed state, on the CPU; never unpickles anything but tensors and plain types."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RecNetsError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch raises half a dozen types for a damaged or foreign file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecNetsError(
            f"{path} is not a readable checkpoint: it is cut short, damaged or foreign ({reason}); "
            f"put back a copy of it, or start a new run with another --out than {path.parent}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecNetsError(f"{path} is not a checkpoint of this version of recnets (format {FORMAT})")
    return content


def check_same_run(content: dict[str, Any], recipe: Recipe, data: str, path: Path) -> None:
    """Refuse to go on with another model, data set or recipe than the checkpoint's."""
    changes = recipe_changes(recipe_from_dict(content["recipe"], source=str(path)), recipe)
    if changes:
        raise RecNetsError(
            f"cannot resume {path.parent} with other settings ({'; '.join(changes)}); "
            "leave them out to go on, or start a new run with --out"
        )
    if content["data"] != data:
        raise RecNetsError(
            f"cannot resume {path.parent}: the training images of {recipe.data} are not those it was started with; "
            "point --data-dir at the same data, or start a new run with --out"
        )


def restore(step: TrainStep, content: dict[str, Any], path: Path, main: bool = True) -> Position:
    """Copy a packed state into a freshly built step, in place; returns where the run stands.

    Only the main process takes the meter's sums, which are those of all processes.
    """
    own = step.model.state_dict()
    missing, extra = sorted(own.keys() - content["model"].keys()), sorted(content["model"].keys() - own.keys())
    if missing or extra:
        raise RecNetsError(
            f"{path} does not fit the model: {len(missing)} tensors missing ({_some(missing)}), "
            f"{len(extra)} unknown ({_some(extra)})"
        )
    pairs = [(own[name], content["model"][name], name) for name in own]
    groups = [("momentum", momentum_buffers(step.optimizer))]
    if step.average is not None:
        groups.append(("average", step.average.tensors()))
    for name, tensors in groups:
        if len(tensors) != len(content[name]):
            raise RecNetsError(f"{path}: {len(content[name])} {name} tensors, expected {len(tensors)}")
        pairs += [(a, b, name) for a, b in zip(tensors, content[name], strict=True)]
    if main:
        pairs += [(a, b, "meter") for a, b in zip(step.meter.tensors(), content["meter"], strict=True)]
    for target, saved, name in pairs:
        if target.shape != saved.shape:
            raise RecNetsError(f"{path}: {name} has shape {tuple(saved.shape)}, expected {tuple(target.shape)}")
    with torch.no_grad():
        for target, saved, _ in pairs:
            target.copy_(saved)
        if not main:
            step.meter.steps.copy_(content["meter"][3])
    step.scaler.load_state_dict(content.get("scaler", {}))  # older checkpoints are of runs without one
    torch.set_rng_state(content["random"])
    if step.device.type == "cuda" and content["random_cuda"] is not None:
        torch.cuda.set_rng_state(content["random_cuda"], step.device)
    return Position(**content["position"])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") or "none"
