"""`export`: a trained model as a file that another runtime runs, checked there before anything is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recnets.data import DataSet
from recnets.deploy import executorch, onnx, openvino
from recnets.deploy.check import Comparison, compare, normalise
from recnets.deploy.int8 import to_int8
from recnets.deploy.live import frozen
from recnets.deploy.liveness import multiply_adds
from recnets.errors import RecNetsError
from recnets.models import RecNet
from recnets.models.profile import check_image_size, count_macs
from recnets.models.weights import image_size_of
from recnets.utils import at_least, atomic_write, check_target, choose

FORMATS = ("onnx", "openvino", "executorch")
SUFFIXES = {"onnx": ".onnx", "onnx-int8": ".onnx", "openvino": ".xml", "executorch": ".pte"}
BATCHES = (1, 2, 7)
# Relative to the largest logit; float32 sums in another order differ by far less.
TOLERANCE = 1e-4
ABOUT_KEYS = ("dataset", "classes", "normalisation", "image_size", "accuracy")


@dataclass(frozen=True)
class Exported:
    """What was written and how it compares with PyTorch on `batches`.

    `file_bytes` counts all files of the format, `weight_bytes` the unique parameters in float32. `transition` is ""
    for models without Recurrent modules. `macs` are multiply-adds of one picture as the file computes it, `model_macs`
    as the model does: an ONNX or OpenVINO file leaves out step channels that are zero anyway.
    """

    path: Path
    format: str
    transition: str
    file_bytes: int
    weight_bytes: int
    difference: float
    agreement: float
    macs: int
    model_macs: int
    batches: tuple[int, ...] = BATCHES


def check(
    model: nn.Module,
    session: Callable[[Tensor], Tensor],
    image_size: tuple[int, int],
    batches: tuple[int, ...] = BATCHES,
) -> tuple[float, float]:
    """(largest difference of a logit, share of equal top-1 answers) on random pictures in `batches`."""
    generator = torch.Generator().manual_seed(0)
    difference, agree, largest = 0.0, 0, 1.0
    for batch in batches:
        x = torch.randn(batch, int(model.in_channels), *image_size, generator=generator)  # type: ignore[arg-type]
        with torch.no_grad():
            expected = model(x)
        got = session(x)
        if got.shape != expected.shape:
            raise RecNetsError(
                f"the exported model gives {tuple(got.shape)} for a batch of {batch}, expected {tuple(expected.shape)}"
            )
        difference = max(difference, float((got - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
        agree += int((got.argmax(1) == expected.argmax(1)).sum())
    if not difference <= TOLERANCE * largest:
        raise RecNetsError(f"the exported model differs from PyTorch by {difference:.3g}, more than rounding explains")
    return difference, agree / sum(batches)


def bytes_of(model: nn.Module) -> int:
    """The unique parameters in float32."""
    return 4 * sum(p.numel() for p in model.parameters())


def _about(metadata: Mapping[str, Any], image_size: tuple[int, int]) -> dict[str, Any]:
    """What is stored with the graph; the size is that of the file, and the accuracy is left out where that is another.

    The file's pictures have one size only, so whoever prepares them has to know it.
    """
    known = {key: metadata[key] for key in ABOUT_KEYS if key in metadata}
    if image_size_of(metadata) != image_size:
        known.pop("accuracy", None)
    return {**known, "image_size": list(image_size)}


def target_of(out: Path | str, format: str) -> Path:
    """`out` as a path, if a file of this format can be written there under this name."""
    out = Path(out)
    if out.suffix != SUFFIXES[format]:
        raise ValueError(f"a file of format {format} ends in {SUFFIXES[format]}, got {out.name!r}")
    return check_target(out)


def size_limit(weight_bytes: int) -> int:
    """Shared weights stored once leave room for the graph, not for copies."""
    return int(1.15 * weight_bytes) + 100_000


def _check_size(content: bytes, weight_bytes: int) -> None:
    if len(content) > size_limit(weight_bytes):
        raise RecNetsError(
            f"the file would have {len(content):,} bytes for {weight_bytes:,} bytes of weights, more than "
            f"{size_limit(weight_bytes):,}: weights are stored more than once"
        )


def export(
    model: nn.Module,
    out: Path | str,
    *,
    format: str = "onnx",
    transition: str = "auto",
    image_size: int | tuple[int, int] = 32,
    metadata: Mapping[str, Any] | None = None,
    max_batch: int = 8,
) -> Exported:
    """Write `model` for another runtime, in evaluation mode and float32, with a batch dimension of any size.

    Args:
        model: a RecNet (unrolled) or another model of this package.
        out: the file; OpenVINO also writes the weights beside it, with the suffix .bin.
        format: "onnx", "openvino" or "executorch".
        transition: "stream" (less memory), "concat", or "auto" for what runs faster here in ONNX Runtime or ExecuTorch.
        image_size: side of the pictures, or (height, width).
        metadata: of the weights file; classes, normalisation and the like are stored with the graph.
        max_batch: ExecuTorch: the largest batch, for which its runtime plans memory; 1 to 15.

    The file is loaded in its runtime and compared with PyTorch; a file that does not agree, or holds copies of shared
    weights, is not left behind, and an old one stays. The model stays as it is.
    """
    choose(format, FORMATS, "format")
    out = target_of(out, format)
    model = frozen(model)
    size = check_image_size(model, image_size)
    about = _about(metadata or {}, size)
    weight_bytes = bytes_of(model)
    if format == "executorch":
        content, transition = executorch.export_executorch(model, size, about, transition, max_batch)
        _check_size(content, weight_bytes)
        batches = executorch.batches(max_batch)
        difference, agreement = check(model, executorch.Session(content), size, batches)
        atomic_write(out, content)
        macs = count_macs(onnx.graph_of(model, "concat", "states"), size), count_macs(model, size)
        return Exported(out, format, transition, len(content), weight_bytes, difference, agreement, *macs, batches)
    content, transition = onnx.export_onnx(model, size, about, transition)
    _check_size(content, weight_bytes)
    if format == "onnx":
        difference, agreement = check(model, onnx.Session(content), size)
        file_bytes = len(content)
        atomic_write(out, content)
    else:
        file_bytes, found = openvino.write_checked(content, out, lambda session: check(model, session, size))
        difference, agreement = found
    macs = multiply_adds(content), count_macs(model, size)
    return Exported(out, format, transition, file_bytes, weight_bytes, difference, agreement, *macs)


def export_int8(
    model: nn.Module,
    out: Path | str,
    data: DataSet,
    metadata: Mapping[str, Any],
    *,
    calibration_images: int = 256,
    max_loss: float = 0.5,
) -> tuple[Exported, Comparison]:
    """Write a RecNet as an 8-bit ONNX file, unless that loses accuracy.

    Ranges come from training pictures; both models are then compared on the whole test set, the file in ONNX Runtime.
    `max_loss` is in points of accuracy; a greater loss is an error with the figures, and nothing is written.
    """
    out = target_of(out, "onnx-int8")
    at_least(max_loss, 0, "max_loss")
    if not isinstance(model, RecNet):
        raise ValueError(f"8-bit files are made of RecNets, got {type(model).__name__}; use format 'onnx'")
    if calibration_images < 1:
        raise ValueError(f"calibration_images must be at least 1, got {calibration_images}")
    model, metadata = frozen(model), dict(metadata)
    # Evenly over the training set, whose order may be by class.
    stride = max(1, len(data.train.images) // calibration_images)
    pictures = normalise(data.train.images[::stride][:calibration_images], metadata)
    about = _about(metadata, data.image_size)
    content = to_int8(model, pictures, data.image_size, about)
    comparison = compare(model, onnx.Session(content), data.test, metadata, len(data.test.images))
    assert comparison.accuracy_before is not None
    assert comparison.accuracy_after is not None
    if comparison.accuracy_before - comparison.accuracy_after > max_loss:
        raise RecNetsError(f"8 bits lose more than {max_loss} points of accuracy, nothing is written. {comparison}")
    content = onnx.with_about(content, {**about, "accuracy": comparison.accuracy_after})
    atomic_write(out, content)
    agreement = 1 - comparison.changed / comparison.images
    sizes, macs = (len(content), bytes_of(model)), (multiply_adds(content), count_macs(model, data.image_size))
    return Exported(out, "onnx-int8", "concat", *sizes, comparison.difference, agreement, *macs), comparison
