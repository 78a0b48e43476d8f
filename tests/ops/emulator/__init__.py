"""CUDA kernels on the CPU, for tests: g++ compiles them with emulator.h in place of CUDA.

The files of a kernel are taken as they are, but for those with a twin in this folder: the headers that hold all PTX.
Shared memory begins as NaN, threads run in an order that a seed decides, copies arrive as late as they may or at once:
what is read too early, or overwritten, shows. Addresses and array bounds are checked. An error is a RuntimeError.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recnets.ops.cuda import kernels, nvrtc

FOLDER = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w", f"-I{FOLDER}"]
# What these find becomes an illegal instruction, and emulator.cpp makes an error of that.
CHECKS = [
    "-fsanitize=alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
]
GUARD = 4096  # bytes before and after a tensor
ALIGNED = 256  # bytes; a tensor stays as aligned as it is
SHARED = 228 * 1024  # bytes of a multiprocessor
Defines = tuple[tuple[str, int], ...]


def source(files: tuple[str, ...], folder: Path) -> str:
    """One translation unit: these files, twins for those that have one, and a way to launch each of their kernels."""
    text = "\n".join((FOLDER / file if (FOLDER / file).exists() else folder / file).read_text() for file in files)
    names = re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(", text)
    # What is shared is a block's own, so that it cannot be a variable of C++.
    dynamic = r"unsigned char* const \1 = emulator::dynamic_shared();"
    text = re.sub(r"extern __shared__ [^;]*unsigned char (\w+)\[\];", dynamic, text)
    variable = r"\1 (&\2)\3 = *(\1 (*)\3)emulator::static_shared(__COUNTER__, sizeof(\1\3));"
    text = re.sub(r"__shared__ (\w+) (\w+)((?:\[\w+\])+);", variable, text)
    return "\n".join(['#include "emulator.h"', text, *(f"EMULATED({name})" for name in names)])


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="recnets-emulator-")


def _compile(text: str, *flags: str) -> Path:
    assert COMPILER is not None
    handle, path = tempfile.mkstemp(dir=_folder().name)
    os.close(handle)
    command = [COMPILER, *FLAGS, "-x", "c++", "-", "-x", "none", *flags, "-o", path]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[:4000]}")
    return Path(path)


@cache
def _runtime() -> Future[Path]:
    text = "\n".join((FOLDER / file).read_text() for file in ("emulator.cpp", "memory.cpp", "wgmma.cpp", "half.cpp"))
    return _compilers().submit(_compile, text, "-O2", "-c")


@cache
def library(text: str, defines: Defines) -> Future[ctypes.CDLL]:
    """A translation unit with these constants, compiled in the background."""
    constants = [f"-D{key}={value}" for key, value in defines]
    runtime = _runtime()

    def load() -> ctypes.CDLL:
        # A kernel's name may be that of another library's function.
        linked = ("-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", str(runtime.result()))
        return ctypes.CDLL(str(_compile(text, "-O1", *CHECKS, *constants, *linked)))

    return _compilers().submit(load)


class Emulator:
    """A device of so many multiprocessors, in place of `nvrtc`."""

    def __init__(self, multiprocessors: int = 4, seed: int = 0, sources: Path = nvrtc.FOLDER) -> None:
        self.multiprocessors, self.seed, self.sources = multiprocessors, seed, sources
        self.launched: list[str] = []  # names of kernels

    def binary(self, files: tuple[str, ...], defines: Defines, index: int = -1) -> Future[ctypes.CDLL]:
        return library(source(files, self.sources), defines)

    def kernel(
        self, files: tuple[str, ...], defines: Defines, name: str, shared: int, index: int = -1, cluster: int = 1
    ) -> EmulatedKernel:
        return EmulatedKernel(self, self.binary(files, defines).result(), name, dict(defines), shared, cluster)

    def replace_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors on the CPU are taken for this device's."""
        monkeypatch.setattr(nvrtc, "kernel", self.kernel)
        monkeypatch.setattr(nvrtc, "binary", self.binary)
        replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            kernels.multiprocessors: lambda index: self.multiprocessors,
            kernels.capable: lambda index: True,
            kernels.has_wgmma: lambda index: True,
            kernels.takes: lambda x: not x.is_cuda and x.dtype in (torch.float16, torch.bfloat16),
        }
        for module in [module for name, module in sys.modules.items() if name.startswith("recnets.")]:
            for original, replacement in replacements.items():
                if vars(module).get(original.__name__) is original:  # also where it was imported by name
                    monkeypatch.setattr(module, original.__name__, replacement)


class EmulatedKernel:
    """As `nvrtc.Kernel`."""

    def __init__(
        self, device: Emulator, library: ctypes.CDLL, name: str, defines: dict[str, int], shared: int, cluster: int
    ) -> None:
        self.device, self.name, self.shared, self.cluster = device, name, shared, cluster
        self.threads, self.bound = defines["THREADS"], defines.get("RESIDENT", 2)
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p

    def resident(self) -> int:
        """What `__launch_bounds__` promises, as far as shared memory allows."""
        return min(self.bound, SHARED // (self.shared + 1024))

    @property
    def clusters_at_once(self) -> int:
        return self.resident() * self.device.multiprocessors // self.cluster

    def __call__(self, grid: tuple[int, int, int], *args: Any, cooperative: bool = False) -> None:
        blocks = grid[0] * grid[1] * grid[2]
        if cooperative and blocks > self.resident() * self.device.multiprocessors:
            raise RuntimeError(f"{self.name}: {blocks} blocks of a cooperative launch are more than the device holds")
        tensors = {arg.data_ptr(): Guarded(arg) for arg in args if isinstance(arg, Tensor)}
        values = [tensors[arg.data_ptr()].pointer if isinstance(arg, Tensor) else nvrtc._value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        sizes = (ctypes.c_int * len(values))(*[ctypes.sizeof(value) for value in values])
        shape = (*grid, self.threads, self.shared, self.cluster, int(cooperative), self.device.seed)
        error = self._launch((ctypes.c_uint * 8)(*shape), pointers, sizes, len(values))
        if error is not None:
            raise RuntimeError(error.decode())
        for tensor in tensors.values():
            tensor.put_back(self.name)
        self.device.launched.append(self.name)


class Guarded:
    """A copy of a tensor between bytes of NaN, which must stay as they are."""

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise RuntimeError(f"a kernel got a tensor of strides {tensor.stride()}")
        self.tensor, self.bytes = tensor, tensor.numel() * tensor.element_size()
        self.copy = torch.full((2 * GUARD + ALIGNED + self.bytes,), 255, dtype=torch.uint8)
        self.first = GUARD + (tensor.data_ptr() - self.copy.data_ptr()) % ALIGNED
        self.pointer = ctypes.c_void_p(self.copy.data_ptr() + self.first)
        ctypes.memmove(self.pointer, tensor.data_ptr(), self.bytes)

    def put_back(self, name: str) -> None:
        around = torch.cat([self.copy[: self.first], self.copy[self.first + self.bytes :]])
        if not bool((around == 255).all()):
            raise RuntimeError(f"{name} wrote outside of a tensor of shape {tuple(self.tensor.shape)}")
        ctypes.memmove(self.tensor.data_ptr(), self.pointer, self.bytes)
