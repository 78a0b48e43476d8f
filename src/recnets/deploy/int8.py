"""8-bit ONNX files in which W_x and W_h are stored once, as integers, and every step uses them.

A step is one QLinearConv of [x_i, h_{i-1}] with J = [W_x·(σ_x/σ_h), W_h], where σ_x and σ_h are the steps of the 8-bit
values of x and of all the hidden states of the layer. J is rounded once, per output channel. A step's BN only changes
the scale and the bias of its QLinearConv, and the ReLU is the lower end of unsigned 8 bits.

A scale must be positive and a BN weight need not be. A channel whose BN weight is negative in some steps and positive
in others has its row of integers stored a second time, negated (exactly: they are symmetric), and such a step
gathers the rows it needs; a runtime does that when it loads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets.deploy.onnx import INPUT, OUTPUT
from recnets.deploy.unrolled import Unrolled, UnrolledRecurrent
from recnets.models import RecNet
from recnets.models.squeezed import Expand
from recnets.utils import require

LEVELS = 255
OPSET, IR_VERSION = 17, 8
# An accumulator of 32 bits has to hold the bias and the sum.
LARGEST_BIAS = 2**30


@torch.no_grad()
def calibrate(network: Unrolled, images: Tensor, batch: int = 64) -> list[tuple[float, float, float]]:
    """(σ of x, of h, of the output) of every Recurrent module, from float32 pictures (N, C, H, W).

    σ reaches the largest value seen. With 255 steps, clipping peaks has a greater squared error than the finer
    steps save, unless the peaks are rarer than one in a million.
    """
    modules = [m for m in network.modules() if isinstance(m, UnrolledRecurrent)]
    largest = torch.zeros(len(modules), 3)
    for pictures in images.split(batch):
        x = network.stem(pictures)
        n = 0
        for i, stage in enumerate(network.stages):
            x = network.pool(x) if i else x
            for module in stage.children():
                assert isinstance(module, UnrolledRecurrent)
                hidden = list(module.states(x))
                y = module.transition(hidden)
                seen = torch.stack([x.max(), torch.stack([h.max() for h in hidden]).max(), y.max()])
                largest[n] = torch.maximum(largest[n], seen)
                x, n = y, n + 1
    return [tuple(row) for row in (largest.clamp_min(1e-6) / LEVELS).tolist()]


class _Writer:
    """Collects nodes and constants of an ONNX graph."""

    def __init__(self, onnx: ModuleType) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, name: str, value: Any, dtype: Any = None) -> str:
        self.constants.setdefault(name, np.asarray(value, dtype=dtype))
        return name

    def node(self, kind: str, inputs: list[str], output: str | list[str], **attributes: Any) -> str:
        outputs = [output] if isinstance(output, str) else output
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, outputs, **attributes))
        return outputs[0]

    def scale(self, value: float) -> str:
        return self.constant(f"s{np.float32(value).tobytes().hex()}", value, np.float32)

    def convolution(
        self, name: str, x: str, sigma_x: float, weight: str, scales: Tensor, shift: Tensor, sigma_y: float, radius: int
    ) -> str:
        """relu(scales·(x ⊛ weight)·σ_x + shift), all in 8 bits: scales (C_out) is of the integers, and not negative."""
        shift = shift.double()
        unit = torch.maximum(scales.double(), shift.abs() / (sigma_x * LARGEST_BIAS)).clamp_min(1e-12)
        bias = (shift / (sigma_x * unit)).round().numpy()
        inputs = [x, self.scale(sigma_x), self.constant("u0", 0, np.uint8), weight]
        inputs += [self.constant(f"{name}.s", unit.numpy(), np.float32), self.constant("i0", 0, np.int8)]
        inputs += [self.scale(sigma_y), "u0", self.constant(f"{name}.b", bias, np.int32)]
        return self.node("QLinearConv", inputs, name, pads=[radius] * 4)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of at most ±127 and a step for each output channel: weight ≈ integers·step."""
    step = (weight.flatten(1).abs().amax(dim=1) / 127).clamp_min(1e-12)
    return (weight / step[:, None, None, None]).round().to(torch.int8), step


def _joint(module: UnrolledRecurrent, ratio: float) -> Tensor:
    """[W_x·ratio, W_h], the smaller kernel in the middle of zeros."""
    size = max(module.weight_x.shape[-1], module.weight_h.shape[-1])

    def padded(weight: Tensor) -> Tensor:
        return F.pad(weight, [(size - weight.shape[-1]) // 2] * 4)

    return torch.cat([padded(module.weight_x) * ratio, padded(module.weight_h)], dim=1)


class _Recurrence:
    """The integers of one layer and which of them a step uses."""

    def __init__(self, writer: _Writer, name: str, module: UnrolledRecurrent, sigma_x: float, sigma_h: float) -> None:
        self.writer, self.name, self.module = writer, name, module
        self.integers, self.step = _rounded(_joint(module, sigma_x / sigma_h))
        scales = torch.stack([getattr(module, f"scale_{i}").flatten() for i in range(module.d)])
        self.scales = scales
        # Stored with the sign that most steps have; a row that some step needs negated is stored twice.
        flip = (scales < 0).sum(dim=0) * 2 > module.d
        self.integers[flip] = -self.integers[flip]
        self.negated = (scales < 0) != flip
        self.negated &= scales != 0
        self.twice = self.negated.any(dim=0).nonzero().flatten()
        whole = torch.cat([self.integers, -self.integers[self.twice]])
        writer.constant(f"{name}.w", whole.numpy())

    def weight(self, i: int) -> str:
        """The name of step i's integers, (s_out, s_in + s_out, k, k); (s_out, s_in, k, k) for the first."""
        rows = torch.arange(len(self.integers))
        second = {int(c): len(rows) + k for k, c in enumerate(self.twice)}
        for c in self.negated[i].nonzero().flatten().tolist():
            rows[c] = second[c]
        chosen = f"{self.name}.w"
        if len(self.twice):
            key = f"{self.name}.r{'_'.join(map(str, self.negated[i].nonzero().flatten().tolist()))}"
            if key not in self.writer.constants:
                self.writer.constant(key, rows.numpy(), np.int32)
                self.writer.node("Gather", [chosen, key], f"{key}.w", axis=0)
            chosen = f"{key}.w"
        if i == 0:
            ends = [self.writer.constant(n, [v], np.int64) for n, v in (("zero", 0), ("one", 1))]
            stop = self.writer.constant(f"{self.name}.s_in", [self.module.s_in], np.int64)
            chosen = self.writer.node("Slice", [chosen, ends[0], stop, ends[1]], f"{self.name}.wx")
        return chosen


def _write_recurrent(
    writer: _Writer, name: str, module: UnrolledRecurrent, x: str, sigmas: tuple[float, float, float]
) -> str:
    sigma_x, sigma_h, sigma_y = sigmas
    if module.padding_mode != "zeros":
        raise ValueError(f"8-bit files are made for padding_mode='zeros', this RecNet has {module.padding_mode!r}")
    layer = _Recurrence(writer, name, module, sigma_x, sigma_h)
    segments = [f"{name}.x{i}" for i in range(module.d)]
    if module.d > 1:
        sizes = writer.constant(f"{name}.sizes", [module.s_in] * module.d, np.int64)
        writer.node("Split", [x, sizes], segments, axis=1)
    else:
        segments = [x]
    radius = layer.integers.shape[-1] // 2
    hidden: list[str] = []
    h = ""
    for i, segment in enumerate(segments):
        read = writer.node("Concat", [segment, h], f"{name}.xh{i}", axis=1) if h else segment
        scales, shift = layer.scales[i].abs() * layer.step, getattr(module, f"shift_{i}").flatten()
        h = writer.convolution(f"{name}.h{i}", read, sigma_h, layer.weight(i), scales, shift, sigma_h, radius)
        kept = getattr(module, f"kept_{i}")
        if kept is None:
            hidden.append(h)
        elif len(kept):
            indices = writer.constant(f"{name}.kept{i}", kept.numpy(), np.int32)
            hidden.append(writer.node("Gather", [h, indices], f"{name}.read{i}", axis=1))
    wide = writer.node("Concat", hidden, f"{name}.h", axis=1)
    assert isinstance(module.matrix, Tensor)
    matrix, start = _expanded(module.matrix, module.start, module.expand)
    integers, step = _rounded(matrix)
    weight = writer.constant(f"{name}.a", integers.numpy())
    return writer.convolution(f"{name}.y", wide, sigma_h, weight, step, start, sigma_y, 0)


def _expanded(weight: Tensor, bias: Tensor, expand: nn.Module) -> tuple[Tensor, Tensor]:
    """A convolution that makes all channels: a squeezed network's constants are rows of zeros with a bias."""
    if isinstance(expand, Expand):
        missing = len(expand.constants)
        weight = torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])[expand.order]
        bias = torch.cat([bias, expand.constants])[expand.order]
    return weight, bias


def _write_classifier(writer: _Writer, classifier: nn.Module, x: str) -> None:
    """The classifier in float32 arithmetic; the first Linear's weights, the largest, are stored in 8 bits."""
    layers = list(classifier) if isinstance(classifier, nn.Sequential) else [classifier]
    for i, layer in enumerate(layers):
        name = OUTPUT if i == len(layers) - 1 else f"head{i}"
        if isinstance(layer, nn.Linear):
            integers, step = _rounded(layer.weight.detach()[:, :, None, None])
            stored = writer.constant(f"head{i}.w", integers.flatten(1).numpy())
            inputs = [stored, writer.constant(f"head{i}.s", step.numpy(), np.float32)]
            inputs.append(writer.constant(f"head{i}.z", np.zeros(len(step)), np.int8))
            weight = writer.node("DequantizeLinear", inputs, f"head{i}.f", axis=0)
            bias = writer.constant(f"head{i}.b", layer.bias.detach().numpy())
            x = writer.node("Gemm", [x, weight, bias], name, transB=1)
        elif isinstance(layer, nn.BatchNorm1d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            scale = (layer.weight / torch.sqrt(layer.running_var + layer.eps)).detach()
            shift = (layer.bias - layer.running_mean * scale).detach()
            x = writer.node("Mul", [x, writer.constant(f"head{i}.m", scale.numpy())], f"head{i}.p")
            x = writer.node("Add", [x, writer.constant(f"head{i}.b", shift.numpy())], name)
        else:
            x = writer.node("Relu" if isinstance(layer, nn.ReLU) else "Identity", [x], name)


def to_int8(model: RecNet, calibration: Tensor, image_size: tuple[int, int], about: Mapping[str, Any]) -> bytes:
    """The bytes of an 8-bit ONNX file, float32 pictures in and float32 logits out, batches of any size.

    Args:
        model: a trained RecNet, squeezed or not.
        calibration: normalised training pictures (N, C, H, W), from which the ranges of all tensors are taken.
        image_size: (height, width) of the pictures.
        about: what is stored with the graph.
    """
    onnx = require("onnx", "export")
    network = Unrolled(model, "concat", "states")
    sigmas = calibrate(network, calibration)
    writer = _Writer(onnx)
    weight, bias = _expanded(network.stem.weight, network.stem.bias, network.stem.expand)
    stem = [writer.constant("stem.w", weight.numpy()), writer.constant("stem.b", bias.numpy())]
    x = writer.node("Conv", [INPUT, *stem], "stem.z", pads=[1] * 4)
    x = writer.node("Relu", [x], "stem.y")
    x = writer.node("QuantizeLinear", [x, writer.scale(sigmas[0][0]), writer.constant("u0", 0, np.uint8)], "x")
    ranges = iter(range(len(sigmas)))
    for i, stage in enumerate(network.stages):
        if i:
            x = writer.node("MaxPool", [x], f"pool{i}", kernel_shape=[2, 2], strides=[2, 2])
        for k, module in enumerate(stage.children()):
            assert isinstance(module, UnrolledRecurrent)
            n = next(ranges)
            # An output is read as the next layer's x: one step for both.
            out = sigmas[n + 1][0] if n + 1 < len(sigmas) else sigmas[n][2]
            x = _write_recurrent(writer, f"{i}.{k}", module, x, (sigmas[n][0], sigmas[n][1], out))
    x = writer.node("DequantizeLinear", [x, writer.scale(sigmas[-1][2]), "u0"], "features")
    x = writer.node("ReduceMean", [x], "pooled", axes=[2, 3], keepdims=0)
    _write_classifier(writer, network.classifier, x)
    return _assemble(writer, model, image_size, about)


def _assemble(writer: _Writer, model: RecNet, image_size: tuple[int, int], about: Mapping[str, Any]) -> bytes:
    helper, kind = writer.onnx.helper, writer.onnx.TensorProto.FLOAT
    outputs = model.num_classes or model.num_features
    graph = helper.make_graph(
        writer.nodes,
        "recnet",
        [helper.make_tensor_value_info(INPUT, kind, ["batch", model.in_channels, *image_size])],
        [helper.make_tensor_value_info(OUTPUT, kind, ["batch", outputs])],
        [writer.onnx.numpy_helper.from_array(value, name) for name, value in writer.constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(proto, {"recnets": json.dumps(about)})
    writer.onnx.checker.check_model(proto)
    return proto.SerializeToString()
