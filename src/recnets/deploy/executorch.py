"""ExecuTorch files (.pte): lowered to XNNPACK, shared weights stored once, batches of any size up to a largest one.

The runtime plans its memory when the file is made, so the file says which batch is the largest.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recnets.deploy.live import frozen
from recnets.deploy.onnx import faster, graph_of, quietly
from recnets.deploy.unrolled import TRANSITIONS
from recnets.errors import RecNetsError
from recnets.models import RecNet
from recnets.utils import choose, require

EXTRA = "executorch"
METHOD, ABOUT = "forward", "recnets"
# PyTorch chooses convolutions differently from a batch of 16 on, and a traced graph is true for one choice.
LARGEST_BATCH = 15


def batches(largest: int) -> tuple[int, ...]:
    """The batches that a file for at most `largest` pictures is checked with."""
    return tuple(sorted({b for b in (1, 2, 7) if b < largest} | {largest}))


def check_largest(batch: int) -> int:
    """`batch` if a file can be made for it."""
    if not 1 <= batch <= LARGEST_BATCH:
        raise ValueError(f"the largest batch of an ExecuTorch file must be 1 to {LARGEST_BATCH}, got {batch}")
    return batch


class Session:
    """A .pte file in ExecuTorch's runtime, called like a model: float32 (N, C, H, W) -> logits."""

    def __init__(self, content: bytes | Path) -> None:
        with quietly(), _native_errors() as said:
            runtime = require("executorch.runtime", EXTRA)
            try:
                self.program = runtime.Runtime.get().load_program(content)
                self.method = self.program.load_method(METHOD)
            except RuntimeError as error:
                raise RecNetsError(f"ExecuTorch cannot load the file: {said() or error}") from error

    def __call__(self, x: Tensor) -> Tensor:
        with _native_errors() as said:
            try:
                return self.method.execute([x.contiguous()])[0].clone()
            except RuntimeError as error:
                raise RecNetsError(f"ExecuTorch fails for a batch of {len(x)}: {said() or error}") from error

    def about(self) -> dict[str, Any]:
        """What was stored of the weights' metadata."""
        return json.loads(self.program.load_method(ABOUT).execute([])[0])


@contextlib.contextmanager
def _native_errors() -> Iterator[Callable[[], str]]:
    """Keep what the runtime writes to stderr itself off the terminal; the function yielded gives its first line."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
            return next((line for line in lines if "cpuinfo" not in line), "")

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _contiguous(module: nn.Module) -> nn.Module:
    """A copy whose tensors all lie in the usual order: a CRC's kernels do not, and the runtime refuses a mixture."""
    module = frozen(module)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.contiguous()
    return module


def _slices(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """`torch.split` as slices: ExecuTorch's verifier fixes the batch to that of the example for operators that return
    lists."""
    return [torch.ops.aten.slice.Tensor(x, dim, start, start + size) for start in range(0, x.shape[dim], size)]


def to_pte(
    module: nn.Module, in_channels: int, image_size: tuple[int, int], about: Mapping[str, Any], largest_batch: int
) -> bytes:
    """The bytes of a .pte file for pictures of `image_size` in batches of 1 to `largest_batch`."""
    with quietly():
        exir = require("executorch.exir", EXTRA)
        xnnpack = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", EXTRA)
    example = torch.zeros(min(2, largest_batch), in_channels, *image_size)
    dynamic = ({0: torch.export.Dim("batch", min=1, max=largest_batch)},) if largest_batch > 1 else None
    with torch.no_grad(), quietly():
        program = torch.export.export(_contiguous(module), (example,), dynamic_shapes=dynamic)
        program = program.run_decompositions({torch.ops.aten.split.Tensor: _slices})
        edge = exir.to_edge_transform_and_lower(
            program, partitioner=[xnnpack.XnnpackPartitioner()], constant_methods={ABOUT: json.dumps(about)}
        )
        return bytes(edge.to_executorch().buffer)


def export_executorch(
    model: nn.Module, image_size: tuple[int, int], about: Mapping[str, Any], transition: str, largest_batch: int
) -> tuple[bytes, str]:
    """(the file's bytes, the transition), as `recnets.deploy.onnx.export_onnx`.

    A step's BN is applied to the states: XNNPACK takes constant weights only, and weights times a step's scale would be
    a copy for each step.
    """
    choose(transition, ("auto", *TRANSITIONS), "transition")
    check_largest(largest_batch)
    in_channels = int(model.in_channels)  # type: ignore[arg-type]
    if not isinstance(model, RecNet):
        return to_pte(graph_of(model, ""), in_channels, image_size, about, largest_batch), ""
    ways = TRANSITIONS if transition == "auto" else (transition,)
    files = {way: to_pte(graph_of(model, way, "states"), in_channels, image_size, about, largest_batch) for way in ways}
    if len(ways) == 1:
        return files[transition], transition
    sessions = {way: Session(content) for way, content in files.items()}
    fastest = faster(sessions, torch.zeros(1, in_channels, *image_size))
    return files[fastest], fastest
