"""CUDA C++ compiled at run time by NVRTC, which comes with PyTorch, and launched through the driver."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recnets.errors import RecNetsError
from recnets.utils import atomic_write

FOLDER = Path(__file__).parent
_log = logging.getLogger("recnets")
LOCAL_BYTES, REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NUM_REGS
SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PORTABLE_CLUSTER = 8


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of PyTorch's CUDA version, from the loader's path or from the packages that PyTorch brings.

    A PyTorch without CUDA takes any: what it compiles, it can look at and not run.
    """
    major = str(torch.version.cuda or "*").split(".")[0]
    name = f"libnvrtc.so.{major}"
    places = [name]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        places += [str(path) for path in Path(folder).glob(f"*/lib/{name}")]
    for place in places:
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        if Path(place).is_absolute():  # it would look for its other half on the loader's path
            for part in Path(place).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
        return library
    raise OSError(f"{name} was not found; it belongs to PyTorch's CUDA packages (pip install nvidia-cuda-nvrtc)")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


def compile_source(source: str, arch: str, defines: Sequence[str]) -> bytes:
    """The binary of a translation unit."""
    return _compile(source, arch, defines)[0]


def _compile(source: str, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
    """The binary of a translation unit, and what the compiler had to say."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"recnets.cu", 0, None, None):
        raise RuntimeError("NVRTC could not start")
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--use_fast_math",
        "--device-as-default-execution-space",
        *options,
    ]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        if failed:
            raise RuntimeError(f"a CUDA kernel does not compile with {' '.join(options)}:\n{log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Resources(NamedTuple):
    """What a kernel takes of a multiprocessor, a thread: registers, and bytes of memory for what spills of them."""

    registers: int
    spilled: int


def resources(files: tuple[str, ...], defines: tuple[tuple[str, int], ...], arch: str = "sm_90") -> Resources:
    """Of the kernel in these files with these constants. Needs NVRTC, but no GPU."""
    options = ["--ptxas-options=-v", *_defined(defines)]
    log = _compile(_text(files), _target(files, arch), options)[1]
    spilled = re.search(r"(\d+) bytes stack frame", log)  # as LOCAL_BYTES
    registers = re.search(r"Used (\d+) registers", log)
    if spilled is None or registers is None:
        raise RuntimeError(f"NVRTC does not say what a kernel takes:\n{log}")
    return Resources(int(registers[1]), int(spilled[1]))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a cluster's shape: an enum, padded to 8 bytes, and a union of 64."""

    _fields_ = (
        ("id", ctypes.c_int), ("padding", ctypes.c_char * 4),
        ("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint), ("rest", ctypes.c_char * 52),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A compiled kernel of a device, launched in clusters of `cluster` blocks."""

    def __init__(self, binary: bytes, name: str, threads: int, shared: int, index: int, cluster: int = 1) -> None:
        self.name, self.threads, self.shared, self.index, self.cluster = name, threads, shared, index, cluster
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), binary), f"loading {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), name)
        if shared > 48 * 1024:
            _check(driver.cuFuncSetAttribute(self._function, SHARED_LIMIT, shared), f"{shared} bytes for {name}")
        if cluster > PORTABLE_CLUSTER:
            _check(driver.cuFuncSetAttribute(self._function, LARGE_CLUSTERS, 1), f"clusters of {cluster} for {name}")

    @property
    def resources(self) -> Resources:
        """What the kernel takes."""
        found = ctypes.c_int()
        taken = []
        for attribute in (REGISTERS, LOCAL_BYTES):
            _check(_driver().cuFuncGetAttribute(ctypes.byref(found), attribute, self._function), self.name)
            taken.append(found.value)
        return Resources(*taken)

    def resident(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        found = ctypes.c_int()
        query = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(query(ctypes.byref(found), self._function, self.threads, ctypes.c_size_t(self.shared)), self.name)
        return found.value

    @cached_property
    def clusters_at_once(self) -> int:
        """Clusters that the device holds at once."""
        found = ctypes.c_int()
        config = self._config((self.cluster, 1, 1), 0)
        query = _driver().cuOccupancyMaxActiveClusters
        _check(query(ctypes.byref(found), self._function, ctypes.byref(config)), f"clusters of {self.name}")
        return found.value

    def _config(self, grid: tuple[int, int, int], stream: int) -> _Config:
        attribute = _Attribute(CLUSTER_DIMENSION, b"", self.cluster, 1, 1, b"")
        return _Config(*grid, self.threads, 1, 1, self.shared, stream, ctypes.pointer(attribute), 1)

    def __call__(self, grid: tuple[int, int, int], *args: Any, cooperative: bool = False) -> None:
        """Launch on the device's current stream. Arguments: tensors, ints (C int), floats (C float), ctypes values."""
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = torch.cuda.current_stream(self.index).cuda_stream
        shape = (*grid, self.threads, 1, 1, self.shared, ctypes.c_void_p(stream), pointers)
        with torch.cuda.device(self.index):  # another one may be current
            if self.cluster > 1:
                config = self._config(grid, stream)
                status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
            elif cooperative:
                status = _driver().cuLaunchCooperativeKernel(self._function, *shape)
            else:
                status = _driver().cuLaunchKernel(self._function, *shape, None)
        _check(status, f"launching {self.name} with {grid} blocks of {self.threads} threads")


def _value(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, int):
        return ctypes.c_int(arg)
    return ctypes.c_float(arg) if isinstance(arg, float) else arg


def cache_folder() -> Path:
    """Where binaries are kept between processes: RECNETS_CACHE, or the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RECNETS_CACHE") or Path(home) / "recnets") / "kernels"


def _kept(source: str, arch: str, defines: Sequence[str]) -> bytes:
    """`compile_source` with the binaries of earlier processes; a folder that cannot be written to is no obstacle."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = repr((source, arch, list(defines), major.value, minor.value)).encode()
    path = cache_folder() / f"{hashlib.sha256(key).hexdigest()}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        _log.info("compiling a CUDA kernel, once for this shape; it is kept in %s", path.parent)
        binary = compile_source(source, arch, defines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, binary)
    except (OSError, RecNetsError):
        pass  # the next process compiles again
    return binary


def _text(files: tuple[str, ...]) -> str:
    return "\n".join((FOLDER / file).read_text() for file in files)


def _target(files: tuple[str, ...], arch: str) -> str:
    """The architecture to compile for; wgmma is only in that one, not in later ones."""
    return f"{arch}a" if "wgmma.cuh" in files else arch


def _defined(defines: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"-D{key}={value}" for key, value in defines]


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="recnets-nvrtc")


@cache
def binary(files: tuple[str, ...], defines: tuple[tuple[str, int], ...], index: int) -> Future[bytes]:
    """The binary of these files with these constants for CUDA device `index`, compiled in the background."""
    major, minor = torch.cuda.get_device_capability(index)
    arch = _target(files, f"sm_{major}{minor}")
    return _compilers().submit(_kept, _text(files), arch, _defined(defines))


@cache
def kernel(
    files: tuple[str, ...], defines: tuple[tuple[str, int], ...], name: str, shared: int, index: int, cluster: int = 1
) -> Kernel:
    """Kernel `name` of these files with these constants (THREADS is one), for CUDA device `index`."""
    with torch.cuda.device(index):
        return Kernel(binary(files, defines, index).result(), name, dict(defines)["THREADS"], shared, index, cluster)
