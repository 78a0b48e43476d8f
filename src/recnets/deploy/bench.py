"""Latency on the CPU of the ways to run a model, taking turns in one run, and what their files and tensors weigh."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from recnets.deploy import openvino
from recnets.deploy.export import bytes_of
from recnets.deploy.int8 import to_int8
from recnets.deploy.liveness import peak_bytes
from recnets.deploy.onnx import Session, export_onnx, graph_of, to_onnx
from recnets.deploy.optimize import optimize
from recnets.deploy.squeeze import squeeze
from recnets.deploy.turns import Build, time_in_turns
from recnets.deploy.unrolled import TRANSITIONS
from recnets.models import RecNet, load_weights, save_weights
from recnets.models.plain import as_plain_modules
from recnets.models.profile import check_image_size
from recnets.models.squeezed import SqueezedStem
from recnets.utils import at_least

PLAIN = "plain modules"
SQUEEZED = "ONNX squeezed"
INT8 = "ONNX 8 bits"


def plain(model: RecNet) -> nn.Module:
    """`model` in plain modules, in evaluation."""
    return as_plain_modules(model).eval()


@dataclass(frozen=True)
class Timing:
    """One way to run a model. Sizes in bytes; `live_bytes` is 0 where it is not known."""

    way: str
    median_ms: float
    best_ms: float
    times_plain: float
    file_bytes: int
    live_bytes: int
    others: float
    """The largest share of a core that other processes took while this was timed."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's unique parameters in float32, and of its files; 0 where a format cannot hold it."""

    parameters: int
    weights: int
    onnx: int
    openvino: int
    int8: int


def has_openvino() -> bool:
    return importlib.util.find_spec("openvino") is not None


def onnx_files(
    model: nn.Module, image_size: tuple[int, int], transitions: tuple[str, ...] = TRANSITIONS
) -> dict[str, bytes]:
    """ONNX files by name. The 8-bit one is calibrated on noise: that changes neither its size nor its latency."""
    channels = int(model.in_channels)  # type: ignore[arg-type]
    if not isinstance(model, RecNet):
        return {"ONNX": to_onnx(graph_of(model, ""), channels, image_size, {})}
    files = {f"ONNX {way}": to_onnx(graph_of(model, way), channels, image_size, {}) for way in transitions}
    noise = torch.randn(2, channels, *image_size, generator=torch.Generator().manual_seed(0))
    return files | {INT8: to_int8(model, noise, image_size, {})}


def squeezed_file(model: nn.Module, image_size: tuple[int, int]) -> dict[str, bytes]:
    """The file of the squeezed model, if squeezing takes something out: training has to have left it dead."""
    if not isinstance(model, RecNet) or isinstance(model.stem, SqueezedStem):
        return {}
    if any(norm.weight is None for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)):
        return {}
    small = squeeze(model)
    if bytes_of(small) == bytes_of(model):
        return {}
    return {SQUEEZED: export_onnx(small, image_size, {})[0]}


def sizes(model: nn.Module, image_size: tuple[int, int] = (32, 32)) -> Sizes:
    """What the files of a model weigh; of the two transitions the streamed one, which has more nodes."""
    with torch.inference_mode(False), torch.no_grad():
        check_image_size(model, image_size)
        files = onnx_files(model, image_size, ("stream",))
    single = next(iter(files.values()))
    pair = 0
    if has_openvino():
        with tempfile.TemporaryDirectory() as folder:
            pair = openvino.write_openvino(single, Path(folder) / "model.xml")
    weights = bytes_of(model)
    return Sizes(weights // 4, weights, len(single), pair, len(files.get(INT8, b"")))


def bench(
    model: nn.Module,
    image_size: tuple[int, int] = (32, 32),
    *,
    repeats: int = 50,
    threads: int = 2,
    compile: bool = False,
    patience: float = 60.0,
) -> list[Timing]:
    """Time a picture at a time, in PyTorch (plain, as it is, optimized), ONNX Runtime and, if installed, OpenVINO.

    `repeats` is the least number of timed runs of each way. All ways take turns, each in its own process. Ways with
    more parallel regions wait more on a busy machine, so turns in which other processes ran are left out if enough
    others come within `patience` seconds. `compile` adds the optimized model through `torch.compile`, which takes
    minutes.
    """
    at_least(patience, 0, "patience")
    check_image_size(model, image_size)
    with torch.inference_mode(False), torch.no_grad(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = onnx_files(model, image_size) | squeezed_file(model, image_size)
        builds = _in_pytorch(model, folder, image_size, compile)
        weigh: dict[str, int] = {}
        for way, content in files.items():
            path = folder / f"{len(weigh)}.onnx"
            path.write_bytes(content)
            builds[way] = partial(Session, str(path), threads)
            weigh[way] = len(content)
        for way in [way for way in files if has_openvino() and way not in (SQUEEZED, INT8)]:
            path, name = folder / f"{len(weigh)}.xml", way.replace("ONNX", "OpenVINO")
            weigh[name] = openvino.write_openvino(files[way], path)
            builds[name] = partial(openvino.Session, path, threads)
        shape = (1, int(model.in_channels), *image_size)  # type: ignore[arg-type]
        found = time_in_turns(builds, shape, threads=threads, repeats=repeats, patience=patience)
    reference = statistics.median(found[PLAIN][1])
    live = {way: peak_bytes(content) for way, content in files.items()}
    return [
        Timing(
            way,
            1e3 * statistics.median(taken),
            1e3 * min(taken),
            reference / statistics.median(taken),
            weigh.get(way, bytes_of(model)),
            live.get(way, 0),
            others,
        )
        for way, (others, taken) in found.items()
    ]


def _loaded(weights: Path, written: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return written(load_weights(weights)[0].eval())


def _in_pytorch(model: nn.Module, folder: Path, image_size: tuple[int, int], compile: bool) -> dict[str, Build]:
    """The ways in PyTorch: the weights from a file, then what is made of the model."""
    weights = folder / "model.safetensors"
    save_weights(weights, model, {})
    made: dict[str, Callable[[nn.Module], nn.Module]] = {PLAIN: nn.Module.eval}
    if isinstance(model, RecNet):
        made = {PLAIN: plain, "RecNet": nn.Module.eval}  # type: ignore[dict-item]
    made["optimized"] = partial(optimize, image_size=image_size)
    if compile:
        made["optimized, compiled"] = partial(optimize, image_size=image_size, compile=True)
    return {way: partial(_loaded, weights, written) for way, written in made.items()}
