"""Tile shapes: how a layer's pixels and channels are cut for the kernels.

A step is short, so what matters first is that every multiprocessor has a tile; after that, the wider the tile, the
less is read twice. The choices below were timed on an H200 (benchmarks/NOTES.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton


class Tiles(NamedTuple):
    """BM pixels by BN channels a program, how many warps share it, and how the loop over taps is compiled."""

    bm: int
    bn: int
    warps: int
    stages: int = 3
    unroll: bool = False


class GradTiles(NamedTuple):
    """A weight gradient: BO × BN entries a program, BP pixels at a time, and how its reduction is split."""

    bo: int
    bn: int
    bp: int
    warps: int
    stages: int
    programs: int  # a multiprocessor; each part of a large weight costs its bytes twice


# Filled by benchmarks to time other shapes than the chosen ones: {(kind, s_out, pixels): …}.
overrides: dict[tuple[str, int, int], Any] = {}


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter, which runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take: 227 KiB of an H200, 99 of many smaller GPUs, 64 of AMD's."""
    properties = torch.cuda.get_device_properties(device)
    names = ("shared_memory_per_block_optin", "shared_memory_per_block")  # not every build of PyTorch has both
    return next((size for name in names if (size := getattr(properties, name, 0))), 64 * 1024)


@cache
def reads_shared_memory(device: torch.device) -> bool:
    """Do tensor cores read what they multiply from shared memory? From compute capability 9 on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def stages(most: int, rows: int, columns: int, inner: int, device: torch.device, itemsize: int) -> int:
    """How many products (rows, inner) x (inner, columns) may be under way: `most`, or as many as fit.

    They wait in shared memory, all but the one that is in registers where tensor cores read it from there.
    """
    if device.type != "cuda":
        return most
    waiting = shared_memory(device) // ((rows + columns) * inner * itemsize)
    return max(1, min(most, waiting + (0 if reads_shared_memory(device) else 1)))


def power(channels: int) -> int:
    """Channels padded to a power of two that a product takes."""
    return max(16, triton.next_power_of_2(channels))


def step_tiles(kind: str, pixels: int, s_out: int, device: torch.device, itemsize: int) -> Tiles:
    """The tile of a recurrent step ("forward" or "backward") over `pixels` pixels of s_out channels."""
    if (kind, s_out, pixels) in overrides:
        return overrides[kind, s_out, pixels]
    if device.type != "cuda":
        return Tiles(32, min(64, power(s_out)), 4)
    if kind == "input":
        return Tiles(128 if itemsize < 4 and s_out <= 16 else 64, power(s_out), 4)
    bn = min(64 if itemsize < 4 else 32, power(s_out))
    columns = triton.cdiv(s_out, bn)
    bm = 64
    limit = {16: 256, 32: 256, 64: 128 if kind == "forward" else 64}[bn] if itemsize < 4 else 64
    while bm < limit and triton.cdiv(pixels, 2 * bm) * columns >= multiprocessors(device) - 4:
        bm *= 2
    return Tiles(bm, bn, 4)


def grad_tiles(pixels: int, s_out: int, columns: int, size: int, device: torch.device, itemsize: int) -> GradTiles:
    """The tile of a weight gradient with `columns` input channels times taps of one row, `size` entries in all."""
    if ("weight", columns, pixels) in overrides:
        return overrides["weight", columns, pixels]
    if itemsize >= 4:
        return GradTiles(min(64, power(s_out)), min(64, power(columns)), 32, 4, 3, 4 if size <= 2**16 else 2)
    bo = min(128, power(s_out))
    bn = min(256 if bo <= 64 else 128, power(columns))
    if bo * bn <= 32 * 32:
        return GradTiles(bo, bn, 128, 4, 1, 8)
    if bo <= 64:
        return GradTiles(bo, bn, 64, 8 if bn == 256 else 4, 3 if bn <= 64 else 2, 4 if bn <= 128 else 2)
    return GradTiles(bo, bn, 32, 4, 3, 2)


def grad_parts(pixels: int, steps: int, rows: int, tiles: GradTiles, device: torch.device) -> tuple[int, int, int]:
    """How a weight gradient's reduction is split: (chunks a step, chunks a part, parts)."""
    chunks = triton.cdiv(pixels, tiles.bp)
    total = chunks * steps
    wanted = max(1, tiles.programs * multiprocessors(device) // rows)
    each = max(1, triton.cdiv(total, wanted))
    return chunks, each, max(1, triton.cdiv(total, each))
