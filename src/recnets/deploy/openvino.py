"""OpenVINO files: an .xml with the graph and a .bin with the weights, made from the ONNX file."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recnets.deploy.onnx import INPUT, OUTPUT
from recnets.errors import RecNetsError
from recnets.utils import require, sync_file, sync_folder

Found = TypeVar("Found")


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


def _settle_biases(model: Any) -> None:
    """Make biases constants of shape (1, C, 1, 1).

    OpenVINO reads the bias of a convolution as a dozen nodes that find out how many dimensions the maps have.
    """
    constant = require("openvino.opset13", "openvino").constant
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape":
            continue
        source = node.input_value(0).get_node()
        readers = [reader.get_node().get_type_name() for reader in node.output(0).get_target_inputs()]
        if source.get_type_name() == "Constant" and len(source.shape) == 1 and readers == ["Add"]:
            node.output(0).replace(constant(source.data.reshape(1, -1, 1, 1)).output(0))
    model.validate_nodes_and_infer_types()


def _shorten(graph: str) -> str:
    """The same graph in fewer bytes: without indentation, and without the names and shapes that a reader infers."""
    graph = re.sub(r">\s+<", "><", graph)
    graph = re.sub(rf' names="(?!{INPUT}"|{OUTPUT}")[^"]*"', "", graph)
    graph = re.sub(r"<dim>[^<]*</dim>", "", graph)
    return re.sub(r"></port>", "/>", graph)


def write_openvino(content: bytes, path: Path) -> int:
    """Write `path` (.xml) and its .bin from the bytes of an ONNX file; returns the bytes of both."""
    openvino = require("openvino", "openvino")
    model = openvino.Core().read_model(io.BytesIO(content))
    _settle_biases(model)
    openvino.save_model(model, str(path), compress_to_fp16=False)
    path.write_text(_shorten(path.read_text(encoding="utf-8")), encoding="utf-8")
    return path.stat().st_size + path.with_suffix(".bin").stat().st_size


def write_checked(content: bytes, out: Path, check: Callable[[Session], Found]) -> tuple[int, Found]:
    """`write_openvino`, if what it writes passes `check`; returns what that found too.

    If anything fails, `out` and its .bin are as before.
    """
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            made = Path(folder) / out.name
            size = write_openvino(content, made)
            found = check(Session(made))
            _replace(made, out)
    except OSError as error:
        raise RecNetsError(f"cannot write {out}: {error.strerror or error}") from error
    return size, found


def _replace(made: Path, out: Path) -> None:
    """Both files in the place of the old ones, the graph last: it is what a reader opens."""
    weights, new, old = out.with_suffix(".bin"), made.with_suffix(".bin"), made.with_suffix(".old")
    if weights.exists():
        shutil.copyfile(weights, old)
    for path in (new, made):
        sync_file(path)
    os.replace(new, weights)
    try:
        os.replace(made, out)
    except OSError:
        if old.exists():
            os.replace(old, weights)
        else:
            weights.unlink()
        raise
    sync_folder(out.parent)
