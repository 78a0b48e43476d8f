"""`recnet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from recnets.cli.output import console
from recnets.data import data_of
from recnets.deploy.export import SUFFIXES, Exported, export, export_int8, target_of
from recnets.models import load_weights
from recnets.models.weights import image_size_of
from recnets.utils import at_least


def command(
    source: Annotated[str, tyro.conf.Positional],
    /,
    *,
    format: Literal["onnx", "onnx-int8", "openvino", "executorch"] = "onnx",
    out: Path | None = None,
    transition: Literal["auto", "stream", "concat"] = "auto",
    image_size: int | None = None,
    max_batch: int = 8,
    calibration: int = 256,
    max_loss: float = 0.5,
    data: str | None = None,
    data_dir: Path | None = None,
    max_bad: float | None = None,
) -> int:
    """Write trained weights for another runtime, and compare its answers with PyTorch's.

    onnx-int8 takes the ranges of all tensors from training pictures, and is written only if its accuracy on the whole
    test set is within --max-loss points of the weights' own.

    Args:
        source: a run folder, a weights file or a published name.
        format: onnx, onnx-int8 (8 bits), openvino (an .xml with its .bin), or executorch (a .pte, run by XNNPACK; takes
            minutes, half as many with a --transition).
        out: the file; by default named after the source, in the current folder.
        transition: how a RecNet's hidden states are summed. stream needs less memory; auto takes the faster one.
            onnx-int8 has concat only.
        image_size: side of the pictures; by default what the weights were trained on. onnx-int8 takes no other.
        max_batch: executorch: the largest batch, 1 to 15; its runtime plans memory for it when the file is made.
        calibration: onnx-int8: number of training pictures.
        max_loss: onnx-int8: points of accuracy that may be lost.
        data: onnx-int8: the data set; by default what the weights were trained on.
        data_dir: onnx-int8: folder with the data sets; RECNETS_DATA, else a cache folder.
        max_bad: onnx-int8: the largest share of unreadable pictures in a folder; by default as in training.
    """
    model, metadata = load_weights(source)
    name = Path(source).name.removesuffix(".safetensors")
    target = out or Path(name + (".int8" if format == "onnx-int8" else "") + SUFFIXES[format])
    target_of(target, format)
    if format == "onnx-int8":
        at_least(max_loss, 0, "max_loss")  # before data are read, or even downloaded
        _check_int8(transition, image_size, image_size_of(metadata))
        found = data_of(metadata, data, data_dir, max_bad)
        options = {"calibration_images": calibration, "max_loss": max_loss}
        made, comparison = export_int8(model, target, found, metadata, **options)  # type: ignore[arg-type]
        beside = str(comparison)
    else:
        made = export(
            model,
            target,
            format=format,
            transition=transition,
            image_size=image_size_of(metadata) if image_size is None else image_size,
            metadata=metadata,
            max_batch=max_batch,
        )
        batches = " and ".join(", ".join(str(b) for b in made.batches).rsplit(", ", 1))
        beside = f"batches of {batches} beside PyTorch: largest difference {made.difference:.2g}, "
        beside += f"top-1 agreement {100 * made.agreement:.0f} %"
    _show(made, beside)
    return 0


def _check_int8(transition: str, image_size: int | None, trained_on: tuple[int, int]) -> None:
    """Refuse what 8-bit files are not made for."""
    if transition == "stream":
        raise ValueError("8-bit files hold all hidden states at once: leave --transition stream away")
    if image_size is not None and (image_size, image_size) != trained_on:
        height, width = trained_on
        raise ValueError(
            f"8-bit files are calibrated and measured on pictures of the size that the weights were trained on, "
            f"{height}×{width}: leave --image-size {image_size} away"
        )


def _show(made: Exported, beside: str) -> None:
    out = console().out  # which wraps no line
    form = f", transition: {made.transition}" if made.transition else ""
    out(f"wrote {made.path}{form}")
    share = made.file_bytes / made.weight_bytes
    weights = f"{made.weight_bytes:,} bytes of float32 weights"
    out(f"{made.file_bytes:,} bytes, {share:.3f} times the {weights}")
    out(_work(made.macs, made.model_macs))
    out(beside)


def _work(macs: int, model_macs: int) -> str:
    text = f"{macs / 1e6:,.1f} million multiply-adds a picture"
    if macs >= model_macs:
        return text
    return f"{text} in place of {model_macs / 1e6:,.1f}: channels that are zero anyway are not computed"
