"""8-bit ONNX files in which W_x and W_h are stored once, as integers, and every step uses them.

A step is one QLinearConv of [x_i, h_{i-1}] with J = [W_x·(σ_x/σ_h), W_h], where σ_x and σ_h are the steps of the 8-bit
values of x and of all the hidden states of the layer. J is rounded once, per output channel. A step's BN only changes
the scale and the bias of its QLinearConv, and the ReLU is the lower end of unsigned 8 bits.

A scale must be positive and a BN weight need not be. A channel whose BN weight is negative in some steps and positive
in others has its row of integers stored a second time, negated (exactly: they are symmetric). A step gathers the rows
and columns it needs, those of the channels that are not zero anyway; a runtime does that when it loads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets.deploy.live import whole
from recnets.deploy.onnx import INPUT, OUTPUT, tell
from recnets.deploy.unrolled import Unrolled, UnrolledRecurrent
from recnets.models import RecNet
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
                states = torch.stack([h.max() for h in hidden if h is not None])
                seen = torch.stack([x.max(), states.max(), y.max()])
                largest[n] = torch.maximum(largest[n], seen)
                x, n = y, n + 1
    return [tuple(row) for row in (largest.clamp_min(1e-6) / LEVELS).tolist()]


class _Writer:
    """Collects nodes and constants of an ONNX graph."""

    def __init__(self, onnx: ModuleType) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.gathered: dict[tuple[Any, ...], str] = {}

    def constant(self, name: str, value: Any, dtype: Any = None) -> str:
        self.constants.setdefault(name, np.asarray(value, dtype=dtype))
        return name

    def node(self, kind: str, inputs: list[str], output: str | list[str], **attributes: Any) -> str:
        outputs = [output] if isinstance(output, str) else output
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, outputs, **attributes))
        return outputs[0]

    def gather(self, source: str, indices: Tensor, axis: int) -> str:
        """A constant's rows or columns, made once however often they are asked for."""
        key = (source, axis, *indices.tolist())
        if key not in self.gathered:
            name = self.gathered[key] = f"g{len(self.gathered)}"
            self.node("Gather", [source, self.constant(f"{name}.i", indices.numpy(), np.int32)], name, axis=axis)
        return self.gathered[key]

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
        scales = torch.zeros(module.d, module.s_out)
        for i in range(module.d):
            scales[i, module.computed(i)] = getattr(module, f"scale_{i}").flatten()
        # Stored with the sign that most steps have; a row that some step needs negated is stored twice.
        flip = (scales < 0).sum(dim=0) > (scales > 0).sum(dim=0)
        self.integers[flip] = -self.integers[flip]
        negated = ((scales < 0) != flip) & (scales != 0)
        twice = negated.any(dim=0)
        self.rows = torch.where(negated, module.s_out + twice.cumsum(0) - 1, torch.arange(module.s_out))
        whole = torch.cat([self.integers, -self.integers[twice]])
        self.whole = writer.constant(f"{name}.w", whole.numpy())
        self.sizes = whole.shape[:2]

    def weight(self, i: int, state: bool) -> str:
        """The name of step i's integers for x_i, and with `state` for h_{i-1} too: (C_i, s_in + C_{i-1}, k, k)."""
        columns = torch.arange(self.module.s_in)
        if state:
            columns = torch.cat([columns, self.module.s_in + self.module.computed(i - 1)])
        chosen = self.whole
        for axis, indices in enumerate((self.rows[i, self.module.computed(i)], columns)):
            if not torch.equal(indices, torch.arange(self.sizes[axis])):
                chosen = self.writer.gather(chosen, indices, axis)
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
        if not module.widths[i]:
            h = ""
            continue
        read = writer.node("Concat", [segment, h], f"{name}.xh{i}", axis=1) if h else segment
        weight = layer.weight(i, state=bool(h))
        scales = getattr(module, f"scale_{i}").flatten().abs() * layer.step[module.computed(i)]
        shift = getattr(module, f"shift_{i}").flatten()
        h = writer.convolution(f"{name}.h{i}", read, sigma_h, weight, scales, shift, sigma_h, radius)
        if module.counts[i]:
            hidden.append(h)
    wide = writer.node("Concat", hidden, f"{name}.h", axis=1)
    assert isinstance(module.matrix, Tensor)
    matrix, start = whole(module.matrix, module.start, module)
    integers, step = _rounded(matrix)
    if module.columns is None:
        weight = writer.constant(f"{name}.a", integers.numpy())
    else:  # a column of zeros serves the channels that the transition does not read
        assert isinstance(module.columns, Tensor)
        stored = writer.constant(f"{name}.a", F.pad(integers, (0, 0, 0, 0, 0, 1)).numpy())
        weight = writer.gather(stored, module.columns, 1)
    return writer.convolution(f"{name}.y", wide, sigma_h, weight, step, start, sigma_y, 0)


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
    network = Unrolled(model, "concat", "weights")
    sigmas = calibrate(network, calibration)
    writer = _Writer(onnx)
    stem = [writer.constant(f"stem.{k}", t.numpy()) for k, t in (("w", network.stem.weight), ("b", network.stem.bias))]
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
    tell(proto, about)
    writer.onnx.checker.check_model(proto)
    return proto.SerializeToString()
