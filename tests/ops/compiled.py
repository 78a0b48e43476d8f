"""The CUDA kernels compiled as for an H200 and not run: what they take of a multiprocessor, on a machine without one.

Tensors may be on the meta device, so that a large batch needs no memory.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from recnets.ops.cuda import nvrtc
from recnets.ops.cuda.inference_plan import AT_ONCE

from .emulator import SHARED, Defines, Emulator

ARCH = "sm_90"
REGISTERS, THREADS, WARP_REGISTERS = 65536, 2048, 256  # of a multiprocessor; a warp takes registers in such lots


def available() -> bool:
    try:
        nvrtc._nvrtc()
    except OSError:
        return False
    return True


class Compiler(Emulator):
    """In place of `nvrtc`, as the emulator; `taken` has what every kernel takes, by its name and constants."""

    def __init__(self, multiprocessors: int = 132) -> None:
        super().__init__(multiprocessors)
        self.taken: dict[tuple[str, Defines], nvrtc.Resources] = {}

    def binary(self, files: tuple[str, ...], defines: Defines, index: int = -1) -> Future[Any]:
        return Future()  # compiled when it is launched

    def kernel(  # type: ignore[override]
        self, files: tuple[str, ...], defines: Defines, name: str, shared: int, index: int = -1, cluster: int = 1
    ) -> CompiledKernel:
        if (name, defines) not in self.taken:
            self.taken[name, defines] = nvrtc.resources(files, defines, ARCH)
        return CompiledKernel(self, self.taken[name, defines], name, dict(defines)["THREADS"], shared, cluster)


class CompiledKernel:
    """As `nvrtc.Kernel`, but a launch only looks whether the device could take it."""

    def __init__(
        self, device: Compiler, taken: nvrtc.Resources, name: str, threads: int, shared: int, cluster: int
    ) -> None:
        self.device, self.taken, self.name, self.threads = device, taken, name, threads
        self.shared, self.cluster = shared, cluster

    def resident(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        warp = -(-32 * self.taken.registers // WARP_REGISTERS) * WARP_REGISTERS
        by_registers = REGISTERS // (warp * self.threads // 32)
        return min(by_registers, SHARED // (self.shared + 1024), THREADS // self.threads)

    @property
    def clusters_at_once(self) -> int:
        return AT_ONCE[self.cluster] * self.resident()

    def __call__(self, grid: tuple[int, int, int], *args: Any, cooperative: bool = False) -> None:
        blocks = grid[0] * grid[1] * grid[2]
        if self.resident() < 1:
            raise RuntimeError(f"{self.name}: a block of {self.threads} threads, {self.taken} does not fit")
        if cooperative and blocks > self.resident() * self.device.multiprocessors:
            raise RuntimeError(f"{self.name}: {blocks} blocks of a cooperative launch are more than the device holds")
        self.device.launched.append(self.name)
