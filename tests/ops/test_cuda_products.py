"""Products of warpgroups, with factors wherever the kernels have them: run this first on a new GPU, it cannot hang.

What is expected follows the canonical layouts without swizzling of the PTX manual (9.7.15.5.1.2.1.3), which CuTe's
mma_traits_sm90_gmma.hpp has too, and not the emulator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from recnets.ops.cuda import kernels, nvrtc

from .compiled import available

Nested: TypeAlias = "int | tuple[Nested, ...]"
Matrix: TypeAlias = tuple[int, int, int]  # its start, leading and stride dimension offset, in 16 bytes
BYTES, GROUPS, TIMES = 224 * 1024, 2, 3
FILES = ("half.cuh", "memory.cuh", "wgmma.cuh", str(Path(__file__).with_name("products.cu")))
COLUMNS = (16, 40, 80, 88)


def size(shape: Nested) -> int:
    if isinstance(shape, int):
        return shape
    product = 1
    for part in shape:
        product *= size(part)
    return product


def offset(index: int, shape: Nested, stride: Nested) -> int:
    """Of an index into a layout `shape:stride`, the first of whose modes turn fastest."""
    if isinstance(shape, int):
        assert isinstance(stride, int)
        return index * stride
    assert isinstance(stride, tuple)
    total = 0
    for part, step in zip(shape, stride, strict=True):
        total += offset(index % size(part), part, step)
        index //= size(part)
    return total


def addresses(matrix: Matrix, rows: int, by_k: bool) -> Tensor:
    """Of all elements (row or column, k) of a factor."""
    start, leading, stride = (8 * units for units in matrix)
    of_rows: tuple[Nested, Nested]
    of_k: tuple[Nested, Nested]
    if by_k:  # ((8,m),(T,2k)):((1T,SBO),(1,LBO))
        of_rows, of_k = ((8, rows // 8), (8, stride)), ((8, 2), (1, leading))
    else:  # ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
        of_rows, of_k = ((8, 1, rows // 8), (1, 8, stride)), ((8, 2), (8, leading))
    return torch.tensor([[start + offset(r, *of_rows) + offset(k, *of_k) for k in range(16)] for r in range(rows)])


def factor(matrix: Matrix) -> int:
    """As wgmma.cuh's matrix_at, from the manual's table of bits."""
    start, leading, stride = matrix
    assert max(matrix) < 1 << 14
    return start | leading << 16 | stride << 32


def anywhere(matrix: Matrix, rows: int, by_k: bool, rng: random.Random) -> Matrix:
    """The same somewhere in memory."""
    last = int(addresses(matrix, rows, by_k).max()) // 8
    return rng.randrange(BYTES // 16 - last), *matrix[1:]


def cases(by_k: bool, n: int, rng: random.Random) -> list[tuple[Matrix, Matrix]]:
    """Factors as the kernels have them, which begin anywhere, in no multiple of 128 bytes; and any others."""
    found = []
    for across in (10, 18, 34):  # slots from row to row
        if by_k:  # taps beside each other, below each other, of two planes; weights
            found += [((0, apart, across), (0, n, 8)) for apart in (1, across - 2, 12 * across + 5)]
        else:  # runs beside each other, below each other, of two images; two rows' chunks
            wide, chunks = across - 2, n // 8
            for pitches in ((8, 8), (9 * (wide + 1) - wide, chunks * (wide + 3) - wide), (500, 301)):
                found.append(((0, pitches[0], wide + 1), (0, pitches[1], wide + 3)))
    found += [((0, rng.randrange(1, 800), rng.randrange(1, 800)), (0, rng.randrange(1, 800), rng.randrange(1, 800)))
              for _ in range(8)]  # fmt: skip
    found *= 4
    found = found[: len(found) // (GROUPS * TIMES) * GROUPS * TIMES]
    return [(anywhere(a, 64, by_k, rng), anywhere(b, n, by_k, rng)) for a, b in found]


def check(dtype: torch.dtype, by_k: bool, n: int, device: str) -> None:
    rng = random.Random(n)
    torch.manual_seed(n)
    memory = torch.randint(-8, 9, (BYTES // 2,)).to(dtype)
    pairs = cases(by_k, n, rng)
    factors = torch.tensor([[factor(a), factor(b)] for a, b in pairs])
    sums = len(pairs) // TIMES
    out = torch.full((sums, 64, n), float("nan"), device=device)
    constants = {"THREADS": 128 * GROUPS, "K_MAJOR": int(by_k), "WIDTH": n, "TIMES": TIMES}
    on_device = memory.to(device)
    kernel = kernels.kernel("products", dtype, on_device.get_device(), constants, BYTES)
    kernel((sums // GROUPS, 1, 1), on_device, factors.to(device), out, BYTES)
    for number, got in enumerate(out.cpu().double()):
        expected = torch.zeros(64, n, dtype=torch.float64)
        for a, b in pairs[number * TIMES : (number + 1) * TIMES]:
            rows, columns = memory[addresses(a, 64, by_k)].double(), memory[addresses(b, n, by_k)].double()
            expected += rows @ columns.t()
        assert torch.equal(got, expected), pairs[number * TIMES : (number + 1) * TIMES]  # integers: exact


@pytest.fixture
def known(monkeypatch) -> None:
    monkeypatch.setitem(kernels.FILES, "products", FILES)


@pytest.mark.skipif(not (torch.cuda.is_available() and kernels.has_wgmma(0)), reason="needs a GPU with wgmma")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("by_k", [True, False], ids=["by k", "by rows"])
@pytest.mark.usefixtures("known")
def test_on_a_gpu(by_k, n, dtype):
    check(dtype, by_k, n, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("by_k", [True, False], ids=["by k", "by rows"])
@pytest.mark.usefixtures("known")
def test_in_the_emulator(by_k, n, dtype, emulated: Callable[..., object]):
    emulated(1)
    check(dtype, by_k, n, "cpu")


@pytest.mark.skipif(not available(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("by_k", [0, 1])
def test_the_kernel_compiles(by_k, n):
    constants = (("FP16", 0), ("K_MAJOR", by_k), ("THREADS", 128 * GROUPS), ("TIMES", TIMES), ("WIDTH", n))
    assert not nvrtc.resources(FILES, constants).spilled


def test_layouts_of_the_manual():
    """Its examples "K-Major, no-swizzling" and "MN-Major, no-swizzling and bf16 type", the former in 16 bits."""
    assert [offset(i, (8, 2), (8, 64)) for i in (1, 7, 8, 9)] == [8, 56, 64, 72]
    of_mn = addresses((0, 16, 8), 16, by_k=False)
    exact = [[offset(r, (8, 1, 2), (1, 8, 64)) + offset(k, (8, 2), (8, 128)) for k in range(16)] for r in range(16)]
    assert of_mn.tolist() == exact
