"""What an ONNX graph costs, from the graph alone: the memory of its tensors and its multiply-adds."""

from __future__ import annotations

import math
from typing import Any

from recnets.utils import require

# Runtimes write these over an input that nothing else reads.
IN_PLACE = ("Relu", "Add", "Mul")
# What multiplies by weights, and which of its inputs they are.
WEIGHT_AT = {"Conv": 1, "QLinearConv": 3, "Gemm": 1, "MatMul": 1}


def multiply_adds(content: bytes) -> int:
    """Of the convolutions and matrix products of one picture."""
    onnx = require("onnx", "export")
    shapes, constants = _shapes(onnx, onnx.load_from_string(content))
    found = 0
    for node in onnx.load_from_string(content).graph.node:
        if node.output[0] in constants or node.op_type not in WEIGHT_AT:
            continue
        weight, out = shapes[node.input[WEIGHT_AT[node.op_type]]][0], math.prod(shapes[node.output[0]][0])
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        inner = weight[1:] if "Conv" in node.op_type or transposed else weight[:1]
        found += out * math.prod(inner)
    return found


def peak_bytes(content: bytes) -> int:
    """The largest sum of tensors alive while the graph runs on one picture, in the order of the file.

    The picture counts, weights and what is computed from weights alone do not. A node's output shares the memory of
    an input of the same size that dies there, for the operators that runtimes apply in place. A convolution whose
    result is only added, next, to a sum that dies there adds into that sum, as fused convolutions do.
    """
    onnx = require("onnx", "export")
    sizes, constants = _sizes(onnx, onnx.load_from_string(content))
    graph = onnx.load_from_string(content).graph
    last_use: dict[str, int] = {graph.output[0].name: len(graph.node)}
    for i, node in enumerate(graph.node):
        for name in node.input:
            last_use[name] = max(i, last_use.get(name, 0))
    for name in _added_in_place(graph, last_use):
        sizes[name] = 0
    alive = {graph.input[0].name}
    peak = sizes[graph.input[0].name]
    for i, node in enumerate(graph.node):
        if all(name in constants for name in node.output):
            continue
        dying = {name for name in node.input if name in alive and last_use[name] == i}
        made = set(node.output)
        if node.op_type in IN_PLACE:
            reused = next((n for n in node.input if n in dying and sizes[n] == sizes[node.output[0]] > 0), None)
            alive -= {reused} if reused else set()
        alive |= made
        peak = max(peak, sum(sizes[name] for name in alive))
        alive -= dying | {name for name in made if name not in last_use}
    return peak


def _added_in_place(graph: Any, last_use: dict[str, int]) -> list[str]:
    """Results of convolutions that go straight into the sum that the next node makes."""
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    found = []
    for i, (node, following) in enumerate(zip(graph.node, list(graph.node)[1:], strict=False)):
        result = node.output[0]
        if node.op_type != "Conv" or following.op_type != "Add" or result not in following.input:
            continue
        others = [name for name in following.input if name != result]
        if readers[result] == 1 and len(others) == 1 and last_use[others[0]] == i + 1:
            found.append(result)
    return found


def _sizes(onnx: Any, model: Any) -> tuple[dict[str, int], set[str]]:
    """(bytes of every tensor for one picture, names of those that do not depend on the picture)."""
    shapes, constants = _shapes(onnx, model)
    return {name: width * math.prod(shape) for name, (shape, width) in shapes.items()}, constants


def _shapes(onnx: Any, model: Any) -> tuple[dict[str, tuple[list[int], int]], set[str]]:
    """((shape, bytes of an element) of every tensor for one picture, names of those that do not depend on it)."""
    for value in (*model.graph.input, *model.graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        dimension.ClearField("dim_param")
        dimension.dim_value = 1
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes = {tensor.name: (list(tensor.dims), 0) for tensor in model.graph.initializer}
    for value in (*inferred.input, *inferred.output, *inferred.value_info):
        kind = value.type.tensor_type
        width = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
        shapes[value.name] = ([d.dim_value for d in kind.shape.dim], width)
    constants = {tensor.name for tensor in model.graph.initializer} | {""}
    for node in model.graph.node:
        if all(name in constants for name in node.input):
            constants |= set(node.output)
    return shapes, constants
