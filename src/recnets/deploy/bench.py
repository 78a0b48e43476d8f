"""Latency on the CPU of the ways to run a model, in one interleaved run, and what their files and tensors weigh."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recnets.deploy.export import bytes_of
from recnets.deploy.int8 import to_int8
from recnets.deploy.liveness import peak_bytes
from recnets.deploy.onnx import Session, graph_of, to_onnx
from recnets.deploy.optimize import optimize
from recnets.layers import Recurrent
from recnets.models import RecNet
from recnets.models.squeezed import recurrent_modules


class PlainRecurrent(nn.Module):
    """A Recurrent module as one would write it at first, which is what everything is measured against.

    A Conv2d pair, an addition, a BatchNorm2d and a ReLU a step; then cat and the transition.
    """

    def __init__(self, module: Recurrent) -> None:
        super().__init__()
        crc = module.crc
        if crc.nonlinearity != "separate_bn_relu" or not crc.recurrent or crc.padding_mode != "zeros":
            raise ValueError(f"only the paper's recurrence is written in plain modules, got {crc!r}")
        assert crc.norm is not None
        self.conv_x, self.conv_h = (self._conv(weight) for weight in (crc.weight_x, crc.weight_h))
        self.norms = nn.ModuleList(nn.BatchNorm2d(crc.s_out) for _ in range(crc.d))
        for name in ("weight", "bias", "running_mean", "running_var"):
            for norm, part in zip(self.norms, getattr(crc.norm, name).detach().split(crc.s_out), strict=True):
                getattr(norm, name).data.copy_(part)
        self.relu = nn.ReLU()
        self.transition = module.transition

    @staticmethod
    def _conv(weight: Tensor) -> nn.Conv2d:
        size = weight.shape[-1]
        conv = nn.Conv2d(weight.shape[1], weight.shape[0], size, padding=size // 2, bias=False)
        conv.weight = nn.Parameter(weight.detach())
        return conv

    def forward(self, x: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for x_i, norm in zip(x.chunk(len(self.norms), dim=1), self.norms, strict=True):
            z = self.conv_x(x_i)
            if hidden:
                z = z + self.conv_h(hidden[-1])
            hidden.append(self.relu(norm(z)))
        return self.transition(torch.cat(hidden, dim=1))


def plain(model: RecNet) -> nn.Module:
    """`model` again, its Recurrent modules written in plain modules."""
    written = copy.deepcopy(model)
    for name, module in recurrent_modules(model).items():
        written.set_submodule(name, PlainRecurrent(module))
    return written.eval()


@dataclass(frozen=True)
class Timing:
    """One way to run a model. Sizes in bytes, 0 where they mean nothing."""

    way: str
    median_ms: float
    best_ms: float
    times_plain: float
    file_bytes: int
    live_bytes: int


def bench(
    model: RecNet, image_size: tuple[int, int] = (32, 32), *, repeats: int = 50, threads: int = 2
) -> list[Timing]:
    """Time a picture at a time, in PyTorch (plain, as it is, optimized) and ONNX Runtime (stream, concat, 8 bits).

    All ways take turns, so that what else the machine does falls on all of them. Not alike: ways with more parallel
    regions wait more on a busy machine, so ratios want a quiet one. The 8-bit file is calibrated on noise; for its
    latency that makes no difference.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(False), torch.no_grad():
            x = torch.randn(1, model.in_channels, *image_size, generator=torch.Generator().manual_seed(0))
            ways: dict[str, Callable[[Tensor], Tensor]] = {"plain modules": plain(model)}
            ways["RecNet"] = model.eval()
            ways["optimized"] = optimize(model, image_size=image_size)
            files = {
                f"ONNX {way}": to_onnx(graph_of(model, way), model.in_channels, image_size, {})
                for way in ("stream", "concat")
            }
            files["ONNX 8 bits"] = to_int8(model, x.expand(2, -1, -1, -1), image_size, {})
            ways.update({way: Session(content, threads) for way, content in files.items()})
            seconds = _time(ways, x, repeats)
    finally:
        torch.set_num_threads(before)
    reference = statistics.median(seconds["plain modules"])
    return [
        Timing(
            way,
            1e3 * statistics.median(taken),
            1e3 * min(taken),
            reference / statistics.median(taken),
            len(files[way]) if way in files else bytes_of(model),
            peak_bytes(files[way]) if way in files else 0,
        )
        for way, taken in seconds.items()
    ]


def _time(ways: dict[str, Callable[[Tensor], Tensor]], x: Tensor, repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(repeats + 3):
        for way, run in ways.items():
            start = time.perf_counter()
            run(x)
            if round_ >= 3:  # the first rounds choose kernels and fill caches
                seconds[way].append(time.perf_counter() - start)
    return seconds
