"""`recnet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from recnets.deploy.export import BATCHES, SUFFIXES, export
from recnets.models import load_weights


def command(
    source: Annotated[str, tyro.conf.Positional],
    /,
    *,
    format: Literal["onnx", "openvino"] = "onnx",
    out: Path | None = None,
    transition: Literal["auto", "stream", "concat"] = "auto",
    image_size: int | None = None,
) -> int:
    """Write trained weights for another runtime, and compare its answers with PyTorch's.

    Args:
        source: a run folder, a weights file or a published name.
        format: onnx, or openvino (an .xml with its .bin).
        out: the file; by default named after the source, in the current folder.
        transition: how a RecNet's hidden states are summed. stream needs less memory; auto takes the faster one.
        image_size: side of the pictures; by default what the weights were trained on.
    """
    model, metadata = load_weights(source)
    known = metadata.get("image_size")
    size = (int(known[0]), int(known[1])) if isinstance(known, list | tuple) else (32, 32)
    if image_size is not None:
        size = (image_size, image_size)
    target = out or Path(Path(source).name.removesuffix(".safetensors") + SUFFIXES[format])
    made = export(model, target, format=format, transition=transition, image_size=size, metadata=metadata)
    batches = ", ".join(str(b) for b in BATCHES[:-1]) + f" and {BATCHES[-1]}"
    console = Console()
    form = f", transition: {made.transition}" if made.transition else ""
    console.print(f"wrote {made.path} for pictures of {size[0]}×{size[1]}{form}", highlight=False)
    console.print(
        f"{made.file_bytes:,} bytes, {made.weight_bytes:,} of them weights ({made.file_bytes / made.weight_bytes:.3f} "
        "times)",
        highlight=False,
    )
    console.print(
        f"batches of {batches} beside PyTorch: largest difference {made.difference:.2g}, "
        f"top-1 agreement {100 * made.agreement:.0f} %",
        highlight=False,
    )
    return 0
