"""OpenVINO files: an .xml with the graph and a .bin with the weights, made from the ONNX file."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from recnets.errors import RecNetsError
from recnets.utils import require


class Session:
    """An OpenVINO model on the CPU, called like a model: float32 (N, C, H, W) -> logits."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        core = require("openvino", "openvino").Core()
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(threads)
        self.request = core.compile_model(core.read_model(str(path)), "CPU", options).create_infer_request()

    def __call__(self, x: Tensor) -> Tensor:
        result = self.request.infer({0: x.numpy()})
        return torch.from_numpy(next(iter(result.values())).copy())


def write_openvino(content: bytes, out: Path) -> int:
    """Write `out` (.xml) and its .bin from the bytes of an ONNX file; returns the bytes of both."""
    openvino = require("openvino", "openvino")
    model = openvino.Core().read_model(io.BytesIO(content))
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            made = Path(folder) / out.name
            openvino.save_model(model, str(made), compress_to_fp16=False)
            weights = made.with_suffix(".bin")
            size = made.stat().st_size + weights.stat().st_size
            os.replace(weights, out.with_suffix(".bin"))  # the graph last: it is what a reader opens
            os.replace(made, out)
    except OSError as error:
        raise RecNetsError(f"cannot write {out}: {error.strerror or error}") from error
    return size
