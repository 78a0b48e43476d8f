"""Tile shapes: how a layer's pixels and channels are cut for the kernels.

A step is short, so what matters first is that every multiprocessor has one tile and no more than it holds at once;
after that, the wider the tile, the less is read twice.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton


class Tiles(NamedTuple):
    """BM pixels by BN channels a program, and how many warps share it."""

    bm: int
    bn: int
    warps: int
    stages: int = 3


# Filled by benchmarks to time other shapes than the chosen ones: {(kind, s_out, pixels): Tiles}.
overrides: dict[tuple[str, int, int], Tiles] = {}


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter, which runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def step_tiles(kind: str, pixels: int, s_out: int, device: torch.device, itemsize: int) -> Tiles:
    """The tile of a recurrent step ("forward" or "backward") over `pixels` pixels of s_out channels."""
    if (kind, s_out, pixels) in overrides:
        return overrides[kind, s_out, pixels]
    if device.type != "cuda":
        return Tiles(32, min(64, max(16, triton.next_power_of_2(s_out))), 4)
    bn = min(64 if itemsize < 4 else 32, max(16, triton.next_power_of_2(s_out)))
    columns = triton.cdiv(s_out, bn)
    bm = 64
    limit = {16: 512, 32: 512, 64: 128}[bn] if itemsize < 4 else 64
    while bm < limit and triton.cdiv(pixels, bm) * columns > multiprocessors(device):
        bm *= 2
    return Tiles(bm, bn, 8 if bm * bn >= 128 * 64 else 4)


def grad_parts(pixels: int, steps: int, rows: int, block: int, device: torch.device) -> tuple[int, int, int]:
    """How a weight gradient's reduction is split: (chunks a step, chunks a part, parts)."""
    chunks = triton.cdiv(pixels, block)
    total = chunks * steps
    wanted = max(1, 2 * multiprocessors(device) // rows)
    each = max(1, triton.cdiv(total, wanted))
    return chunks, each, max(1, triton.cdiv(total, each))
