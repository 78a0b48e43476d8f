"""ONNX files: shared weights stored once, batch of any size, checked at once in ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recnets.deploy.live import frozen
from recnets.deploy.unrolled import TRANSITIONS, Unrolled
from recnets.models import RecNet
from recnets.utils import choose, require

INPUT, OUTPUT = "images", "logits"
# Constants up to this many numbers are computed at export; weights times a step's scale are larger, and must not be:
# a copy of W_x and W_h for each step is what the paper avoids. Runtimes multiply them when they load the file.
FOLD_UP_TO = 256
ROUNDS = 15


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Exporters log and warn of their own insides; errors still raise."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def graph_of(model: nn.Module, transition: str, scale: str = "weights") -> nn.Module:
    """What is exported: a RecNet unrolled, any other model as it is."""
    return Unrolled(model, transition, scale) if isinstance(model, RecNet) else frozen(model)


def to_onnx(module: nn.Module, in_channels: int, image_size: tuple[int, int], about: Mapping[str, Any]) -> bytes:
    """The bytes of an ONNX file for pictures of `image_size` in batches of any size; `about` goes in as JSON."""
    require("onnx", "export")
    optimizer = require("onnxscript", "export").optimizer
    example = torch.zeros(2, in_channels, *image_size)
    with torch.no_grad(), quietly():
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=[INPUT],
            output_names=[OUTPUT],
            optimize=False,
            verbose=False,
        )
        assert program is not None
        optimizer.optimize_ir(program.model, input_size_limit=1024, output_size_limit=FOLD_UP_TO)
    proto = program.model_proto
    for node in proto.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for field in ("value_info", "metadata_props", "doc_string"):
        proto.graph.ClearField(field)
    tell(proto, about)
    return proto.SerializeToString()


def tell(proto: Any, about: Mapping[str, Any]) -> None:
    """Store `about` with a graph, as JSON and in place of what was there."""
    proto.ClearField("metadata_props")
    entry = proto.metadata_props.add()
    entry.key, entry.value = "recnets", json.dumps(about)


def with_about(content: bytes, about: Mapping[str, Any]) -> bytes:
    """An ONNX file that tells something else of itself."""
    proto = require("onnx", "export").load_from_string(content)
    tell(proto, about)
    return proto.SerializeToString()


class Session:
    """An ONNX file in ONNX Runtime, called like a model: float32 (N, C, H, W) -> logits."""

    def __init__(self, content: bytes | str, threads: int | None = None) -> None:
        runtime = require("onnxruntime", "export")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.session.run([OUTPUT], {INPUT: x.numpy()})[0]))


def faster(sessions: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> str:
    """The name of the session that answers `x` in the shortest time, measured in turns."""
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            start = time.perf_counter()
            session(x)
            best[name] = min(best[name], time.perf_counter() - start)
    return min(best, key=best.__getitem__)


def export_onnx(
    model: nn.Module, image_size: tuple[int, int], about: Mapping[str, Any], transition: str = "auto"
) -> tuple[bytes, str]:
    """(the file's bytes, the transition): for "auto" both forms are exported and timed at batch 1, and the faster kept.

    Models that are no RecNets have no transition: "".
    """
    choose(transition, ("auto", *TRANSITIONS), "transition")
    in_channels = int(model.in_channels)  # type: ignore[arg-type]
    if not isinstance(model, RecNet):
        return to_onnx(graph_of(model, ""), in_channels, image_size, about), ""
    ways = TRANSITIONS if transition == "auto" else (transition,)
    files = {way: to_onnx(graph_of(model, way), in_channels, image_size, about) for way in ways}
    if len(ways) == 1:
        return files[transition], transition
    sessions = {way: Session(content) for way, content in files.items()}
    fastest = faster(sessions, torch.zeros(1, in_channels, *image_size))
    return files[fastest], fastest
