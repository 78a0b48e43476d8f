"""Compile the Triton kernels for a GPU that need not be there: `python compile_worker.py cuda 90 232448`.

The operators run on tensors of the CPU; every launch compiles its kernel for the GPU and goes no further. Prints, as
JSON, the bytes of shared memory that each kernel takes at most, and the kernels that were never launched.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from recnets.ops.triton import backward, batch_norm, forward, op, stem, tiles

MULTIPROCESSORS = 132
# N, H, W, s_in, s_out, d, kernel_x, kernel_h
SHAPES = [
    (64, 32, 32, 8, 32, 3, 3, 3),
    (64, 8, 8, 32, 256, 3, 3, 3),
    (5, 9, 13, 12, 48, 2, 1, 3),
    (64, 16, 16, 4, 8, 2, 3, 1),
]


class Target:
    """As Triton's driver, for a device that is only compiled for."""

    def __init__(self, backend: str, arch: str) -> None:
        self.target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def crc(
    shape: tuple[int, ...], dtype: torch.dtype, *, batch: bool = True, relu: bool = True, early: bool = False
) -> None:
    """All launches of a CRC layer in training."""
    n, h, w, s_in, s_out, d, kernel_x, kernel_h = shape
    op._early = lambda x, follows: {"PDL": True, "launch_pdl": True} if early and follows else {"PDL": False}
    x = torch.empty(n, d * s_in, h, w, dtype=dtype).to(memory_format=torch.channels_last)
    weights = [torch.empty(s_out, s, k, k) for s, k in ((s_in, kernel_x), (s_out, kernel_h))]
    norm = list(torch.empty(2, d * s_out))
    known = None if batch else torch.empty(2, d, s_out)
    hidden, z, sums = op.crc(x, *weights, *norm, known, d, 1e-5, relu)
    op.crc_backward(hidden, x, hidden, z, sums if known is None else known, *weights, *norm, 1e-5, batch, relu)
    if batch:
        op.update_running(sums, *torch.empty(2, d * s_out), n * h * w, 0.1)


def launch_everything(early: bool) -> None:
    for batch, relu in ((True, False), (False, True), (False, False)):
        crc(SHAPES[0], torch.bfloat16, batch=batch, relu=relu)
    torch.use_deterministic_algorithms(True)
    crc(SHAPES[0], torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES if dtype == torch.bfloat16 else SHAPES[1:2]:  # exact products take their time to compile
            crc(shape, dtype, early=early)
        y, norm = torch.empty(64, 80, 32, 32, dtype=dtype).to(memory_format=torch.channels_last), torch.empty(2, 80)
        out, sums = batch_norm.norm_relu_train(y, *norm, 1e-5, 1)
        batch_norm.norm_relu_train_backward(out, y, sums, *norm, 1e-5, 1)
        out, sums = batch_norm.norm_relu_pool_train(y, *norm, 1e-5, 1)
        batch_norm.norm_relu_pool_train_backward(out, y, sums, *norm, 1e-5, 1)
        stem.neighbours(torch.empty(64, 3, 32, 32), dtype)


def main(backend: str, arch: str, shared_memory: str) -> None:
    driver.set_active(Target(backend, arch))
    found: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = max(found.get(self.fn.__name__, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    device = torch.device("cuda", 0)
    for module in (tiles, batch_norm):
        module.multiprocessors = lambda _: MULTIPROCESSORS
    hopper = backend == "cuda" and int(arch) >= 90
    tiles.shared_memory = lambda _: int(shared_memory)
    tiles.reads_shared_memory = lambda _: hopper
    op.step_tiles = lambda kind, pixels, s_out, _, size: tiles.step_tiles(kind, pixels, s_out, device, size)
    op.stages = lambda most, rows, columns, inner, _, size: tiles.stages(most, rows, columns, inner, device, size)
    launch_everything(hopper)
    every = {
        value.fn.__name__ for module in (forward, backward, batch_norm, stem) for value in vars(module).values()
        if isinstance(value, JITFunction) and value.fn.__name__.endswith("_kernel")
    }  # fmt: skip
    print(json.dumps({"shared": found, "missing": sorted(every - set(found))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
