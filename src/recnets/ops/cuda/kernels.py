"""Which files make which kernel, and what a device must have to run them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache

import torch
from torch import Tensor

from recnets.ops.cuda import nvrtc, plan

TILES = ("half.cuh", "memory.cuh", "common.cuh")
WIDE = (*TILES, "wgmma.cuh", "planes.cuh")
FILES = {
    "forward": (*TILES, "forward.cuh", "forward.cu"),
    "forward_wide": (*WIDE, "forward.cuh", "forward_wide.cu"),
    "backward": (*TILES, "backward.cuh", "backward.cu"),
    "backward_wide": (*WIDE, "backward.cuh", "backward_wide.cu"),
    "add_parts": ("add_parts.cu",),
    "inference": (*TILES, "cluster.cuh", "inference.cu"),
    "pack": ("half.cuh", "pack.cuh", "pack.cu"),
    "weight_grad_wide": (*TILES, "wgmma.cuh", "weight_grad_wide.cu"),
    "prepare": ("half.cuh", "pack.cuh", "prepare.cu"),
    "norm_relu_forward": ("half.cuh", "memory.cuh", "norm_relu.cu"),
    "norm_relu_backward": ("half.cuh", "memory.cuh", "norm_relu.cu"),
}


@cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def capable(index: int) -> bool:
    """Tensor cores with bfloat16 and asynchronous copies, enough shared memory, and NVRTC."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None or properties.major < 9:
        return False
    try:
        nvrtc.compile_source("", f"sm_{properties.major}{properties.minor}", [])
    except (OSError, RuntimeError):
        return False
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= plan.SHARED)


@cache
def has_wgmma(index: int) -> bool:
    """Tensor cores that read shared memory themselves, as those of compute capability 9 do and no others."""
    return torch.cuda.get_device_properties(index).major == 9


def takes(x: Tensor) -> bool:
    """Half precision, on a device that can run the kernels."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and capable(x.get_device())


def _source(
    name: str, dtype: torch.dtype, defines: dict[str, int]
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """(files, constants) of a kernel for a dtype."""
    files = FILES.get(name, (*TILES, f"{name}.cu"))
    threads = defines.get("THREADS") or 32 * defines["WM"] * defines["WN"]
    return files, tuple(sorted({**defines, "THREADS": threads, "FP16": int(dtype == torch.float16)}.items()))


def kernel(
    name: str, dtype: torch.dtype, index: int, defines: dict[str, int], shared: int = 0, cluster: int = 1
) -> nvrtc.Kernel:
    """Kernel `name` with these constants for CUDA device `index`: `shared` bytes a block, blocks in clusters."""
    return nvrtc.kernel(*_source(name, dtype, defines), name, shared, index, cluster)


def compile_ahead(name: str, dtype: torch.dtype, index: int, defines: dict[str, int]) -> Future[bytes]:
    """Start compiling what will be needed, in the background."""
    return nvrtc.binary(*_source(name, dtype, defines), index)


def resources(name: str, dtype: torch.dtype, defines: dict[str, int], arch: str = "sm_90") -> nvrtc.Resources:
    """What kernel `name` with these constants takes of a multiprocessor, on any machine that has NVRTC."""
    return nvrtc.resources(*_source(name, dtype, defines), arch)
