"""How a layer is cut for the CUDA kernels: tiles, warps, shared memory. Mirrors the constants of the .cu files."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from recnets.ops.cuda import tuned

SHARED = 227 * 1024  # bytes a block may take on compute capability 9; smaller devices give less
MOST_WARPS = 8
FETCH_REGISTERS = 110  # a thread's sums and what it fetches ahead may take so many; with more, the compiler spills


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


def pitch(channels: int) -> int:
    """Bytes from pixel to pixel in shared memory: an odd number of 16s."""
    chunks = cdiv(channels, 8)
    return (chunks + (chunks + 1) % 2) * 16


def packed_bytes(channels: int, kernel: int, outputs: int) -> int:
    """Bytes of a kernel packed for the tensor cores, in either order of pack.cuh."""
    return cdiv(kernel * kernel * round_up(channels, 8), 16) * outputs * 32


def plane(channels: int, slots: int) -> int:
    """Bytes of 8 channels of a tile in shared memory, see common.cuh."""
    chunks = cdiv(channels, 8)
    return (slots + ({1: 0, 2: 4, 4: 2}.get(chunks, 1) - slots) % 8) * 16


class Layer(NamedTuple):
    """A CRC layer on a batch: what all plans depend on."""

    n: int
    h: int
    w: int
    d: int
    si: int
    so: int
    kx: int
    kh: int
    apart: bool = False  # x_i lie apart: a map of si channels for every step


class Tile(NamedTuple):
    """IMAGES × ROWS × W pixels: whole images, or rows of one image."""

    images: int
    rows: int

    def count(self, layer: Layer) -> int:
        return cdiv(layer.n, self.images) if self.rows == layer.h else layer.n * cdiv(layer.h, self.rows)

    def pixels(self, layer: Layer) -> int:
        return self.images * self.rows * layer.w

    def slots(self, layer: Layer, kernel: int) -> int:
        halo = kernel // 2
        return self.images * (self.rows + 2 * halo) * (layer.w + 2 * halo)


class Plan(NamedTuple):
    """Constants of one kernel."""

    tile: Tile
    nb: int
    wm: int
    wn: int
    mt: int
    nt: int
    resident: int
    shared: int
    single: bool = False  # one tile a block, kept in shared memory from step to step
    dx: int = 0  # backward: channels of dx a block computes, padded to 16; 0 where another launch does it
    dx_tiles: int = 0  # of 8 of these channels, a warp
    dx_split: bool = False  # the blocks of a tile share the channels of dx out
    prefetch: bool = False  # the next tile is fetched while one is convolved
    stacked: bool = False  # a warp's tiles of 16 pixels lie below each other
    wide: bool = False  # by forward_wide.cu or backward_wide.cu
    buffers: int = 1  # of these: tiles in shared memory

    def kernel(self, name: str) -> str:
        return f"{name}_wide" if self.wide else name

    def defines(self, layer: Layer) -> dict[str, int]:
        return {
            "SINGLE": int(self.single), "DX": self.dx, "DX_TILES": self.dx_tiles,
            "DX_SPLIT": int(self.dx_split), "PREFETCH": int(self.prefetch), "STACKED": int(self.stacked),
            "H": layer.h, "W": layer.w, "D": layer.d, "SI": layer.si, "SO": layer.so, "KX": layer.kx, "KH": layer.kh,
            "APART": int(layer.apart), "IMAGES": self.tile.images, "ROWS": self.tile.rows, "NB": self.nb, "WM": self.wm,
            "WN": self.wn, "MT": self.mt, "NT": self.nt, "RESIDENT": self.resident, "WIDE": int(self.wide),
            "BUFFERS": self.buffers,
        }  # fmt: skip


# For benchmarks, to time other plans than the chosen ones: {(kernel's name, layer): plan}.
overrides: dict[tuple[str, Layer], Plan] = {}


def tiles(layer: Layer) -> list[Tile]:
    """Tiles to choose from, small to large."""
    rows = [r for r in (1, 2, 4, 8, 16, 32) if r < layer.h]
    return [Tile(1, r) for r in rows] + [Tile(n, layer.h) for n in (1, 2, 4, 8) if n == 1 or n * layer.h <= 64]


def block_channels(so: int) -> int | None:
    """Output channels a block takes, or None where no kernel exists."""
    if so % 16 or so > 128:
        return None
    return so if so <= 64 else so // 2 if so % 32 == 0 else None


def warps(pixels: int, nb: int, most: int = MOST_WARPS, largest: int = 16) -> tuple[int, int, int, int] | None:
    """(WM, WN, MT, NT): as many warps as there is work for, each with as square a part as possible."""
    mtot, ntot = cdiv(pixels, 16), nb // 8
    best: tuple[float, tuple[int, int, int, int]] | None = None
    for wn in (1, 2, 3, 4):
        if ntot % wn or (ntot // wn) % 2:
            continue
        nt = ntot // wn
        for wm in (1, 2, 4, 8, 16):
            mt = cdiv(mtot, wm)
            if wm * wn > most or mt * nt > largest or (wm > mtot):
                continue
            # Reads of shared memory for a product, by all warps: what limits a step.
            cost = wm * wn * (mt + nt / 2) + 40.0 / (wm * wn)
            if best is None or cost <= best[0]:
                best = cost, (wm, wn, mt, nt)
    return None if best is None else best[1]


def own_bytes(pixels: int, nb: int) -> int:
    """A block's channels of its own pixels, see common.cuh."""
    return pixels * (nb * 2 if nb in (16, 32, 64) else pitch(nb))


def _shared(name: str, layer: Layer, tile: Tile, nb: int, wm: int, dx: int) -> int:
    """Bytes of shared memory of a step kernel."""
    own = own_bytes(tile.pixels(layer), nb)
    size = packed_bytes(layer.so, layer.kh, nb) + tile.slots(layer, layer.kh) * pitch(layer.so) + own
    if name == "forward":
        size += packed_bytes(layer.si, layer.kx, nb) + tile.slots(layer, layer.kx) * pitch(layer.si)
        return size + (2 * layer.so + wm * 2 * nb) * 4
    return size + own + packed_bytes(layer.so, layer.kx, dx) + (max(3 * layer.so, wm * 2 * nb) + 4 * nb) * 4


def _along(layer: Layer, nb: int, wn: int) -> tuple[int, int, bool]:
    """(DX, DX_TILES, DX_SPLIT): how dx comes along in the backward kernel."""
    splits = layer.so // nb
    if layer.kx != layer.kh or layer.si > layer.so:
        return 0, 0, False
    for share, split in ((layer.si // splits, True), (layer.si, False)):
        tiles = cdiv(cdiv(share, 8), wn)
        dx = round_up(8 * tiles * wn, 16)
        # Blocks find their share where the one before ends: nothing may be filled up.
        if not split or (splits > 1 and dx * splits == layer.si):
            break
    return dx, tiles, split


def fetched_registers(name: str, layer: Layer, tile: Tile, threads: int) -> int:
    """Of a thread, for its part of a tile's z, in the backward pass of m and z: `NextTile` of the kernels."""
    loads = cdiv(tile.slots(layer, layer.kh), threads // (layer.so // 8))
    return (4 if name == "forward" else 8) * loads


def plan_of(
    name: str, layer: Layer, tile: Tile, nb: int, shape: tuple[int, int, int, int], multiprocessors: int
) -> Plan | None:
    """The plan with these choices, or None where it does not fit."""
    wm, wn, mt, nt = shape
    along = _along(layer, nb, wn) if name == "backward" else (0, 0, False)
    if _shared(name, layer, tile, nb, wm, along[0]) > SHARED:
        along = (0, 0, False)
    shared = _shared(name, layer, tile, nb, wm, along[0])
    if shared > SHARED:
        return None
    single = tile.count(layer) * (layer.so // nb) <= multiprocessors
    registers = 4 * mt * (nt + along[1]) + fetched_registers(name, layer, tile, 32 * wm * wn)
    return Plan(tile, nb, *shape, 1, shared, single, *along, prefetch=not single and registers <= FETCH_REGISTERS)


def with_residents(cut: Plan, layer: Layer, resident: int, prefetch: bool, multiprocessors: int) -> Plan:
    """The plan with so many blocks a multiprocessor; where all tiles are there at once, none is fetched ahead."""
    single = cut.tile.count(layer) * (layer.so // cut.nb) <= resident * multiprocessors
    return cut._replace(resident=resident, single=single, prefetch=prefetch and not single)


def stackable(cut: Plan, layer: Layer) -> bool:
    """Can a warp's tiles lie below each other, so that their convolution reads a row of pixels once for three taps?"""
    whole = cut.tile.rows % cut.mt == 0 and cut.wm * cut.mt * 16 == cut.tile.pixels(layer)
    return layer.kh == 3 and whole and (layer.w == 8 or layer.w % 16 == 0)


PATCH = 64  # pixels of a product of a warpgroup
MOST_COLUMNS = 88  # outputs of such a product, see wgmma.cuh


def wide_plan_of(name: str, layer: Layer, tile: Tile, groups: int, buffers: int, resident: int) -> Plan | None:
    """The plan of a step by wgmma with so many warpgroups, or None where its kernel does not take the layer or tile."""
    nb, pixels = block_channels(layer.so), tile.pixels(layer)
    if nb is None or layer.kx != 3 or layer.kh != 3 or layer.w % 8 or tile.rows % 8 or pixels % (PATCH * groups):
        return None
    if layer.si % 4 or (name == "backward" and layer.si > layer.so):
        return None
    dx_tiles, split = 0, False
    if name == "backward":
        splits = layer.so // nb
        split = splits > 1 and layer.si % (8 * splits) == 0
        dx_tiles = cdiv(layer.si // splits if split else layer.si, 8)
        dx_tiles = dx_tiles if nb + 8 * dx_tiles <= MOST_COLUMNS else 0
    own, wm = own_bytes(pixels, nb), 4 * groups
    shared = packed_bytes(layer.so, 3, nb + 8 * dx_tiles) + own
    tiles = cdiv(layer.so, 8) * plane(layer.so, tile.slots(layer, 3))
    if name == "forward":
        tiles += cdiv(layer.si, 8) * plane(layer.si, tile.slots(layer, 3))
        shared += packed_bytes(layer.si, 3, nb) + (2 * layer.so + wm * 2 * nb) * 4
    else:
        shared += own + (max(3 * layer.so, wm * 2 * nb) + 4 * nb) * 4
    shared += buffers * tiles
    if shared > SHARED or resident * (shared + 1024) > SHARED + 1024:
        return None
    shape = (wm, 1, pixels // (PATCH * groups), nb // 8)
    return Plan(
        tile,
        nb,
        *shape,
        resident,
        shared,
        dx=8 * dx_tiles,
        dx_tiles=dx_tiles,
        dx_split=split,
        wide=True,
        buffers=buffers,
    )


def _tuned_step(name: str, layer: Layer, multiprocessors: int, wgmma: bool) -> Plan | None:
    """The plan that was measured to be the fastest, where there is one and it fits these kernels."""
    kept = tuned.choice(name, layer, multiprocessors)
    if kept is None or (kept["wide"] and not wgmma):
        return None
    if kept["wide"]:
        tile = Tile(kept["images"], kept["rows"])
        return wide_plan_of(name, layer, tile, kept["wm"] // 4, kept["buffers"], kept["resident"])
    shape = (kept["wm"], kept["wn"], kept["mt"], kept["nt"])
    cut = plan_of(name, layer, Tile(kept["images"], kept["rows"]), kept["nb"], shape, multiprocessors)
    if cut is None or (kept["stacked"] and not stackable(cut, layer)):
        return None
    cut = with_residents(cut, layer, kept["resident"], kept["prefetch"], multiprocessors)
    return cut._replace(stacked=kept["stacked"])


def _candidate(name: str, layer: Layer, tile: Tile, nb: int, multiprocessors: int) -> tuple[float, Plan] | None:
    """A plan with this tile and its cost, by a rough model of a step: pixels a multiprocessor has to go through."""
    shapes = [warps(tile.pixels(layer), nb, largest=largest) for largest in (16, 8, 4)]
    plans = [plan_of(name, layer, tile, nb, shape, multiprocessors) for shape in shapes if shape]
    found = [plan for plan in plans if plan is not None]
    if not found:
        return None
    # Smaller parts of a warp where these leave registers to fetch the next tile.
    plan = next((plan for plan in found if plan.prefetch), found[0])
    blocks = tile.count(layer) * (layer.so // nb)
    halo = tile.slots(layer, layer.kh) - tile.pixels(layer)
    cost = cdiv(blocks, multiprocessors) * (tile.pixels(layer) + 0.3 * halo + 32)
    return cost * (0.8 if plan.single else 0.85 if plan.prefetch else 1), plan


@cache
def step(name: str, layer: Layer, multiprocessors: int, wgmma: bool = False) -> Plan | None:
    """The plan of "forward" or "backward", or None where the layer does not fit. `wgmma`: the device has it."""
    if (name, layer) in overrides:
        return overrides[name, layer]
    nb = block_channels(layer.so)
    if nb is None or layer.si % 4 or layer.kx not in (1, 3) or layer.kh not in (1, 3):
        return None
    kept = _tuned_step(name, layer, multiprocessors, wgmma)
    if kept is not None:
        return kept
    found = [_candidate(name, layer, tile, nb, multiprocessors) for tile in tiles(layer)]
    candidates = [candidate for candidate in found if candidate is not None]
    return min(candidates)[1] if candidates else None


@cache
def input_grad(layer: Layer, multiprocessors: int) -> Plan | None:
    """The plan of the gradient of x."""
    if ("input_grad", layer) in overrides:
        return overrides["input_grad", layer]
    nb = round_up(layer.si, 16)
    nt = cdiv(layer.si, 8)
    weights = packed_bytes(layer.so, layer.kx, nb)
    best: Plan | None = None
    for tile in tiles(layer):
        shared = weights + tile.slots(layer, layer.kx) * pitch(layer.so)
        m = cdiv(tile.pixels(layer), 16)
        wm = min(MOST_WARPS, m)
        mt = cdiv(m, wm)
        if shared > SHARED or mt * nt > 16:
            continue
        resident = max(1, min(4, 226 * 1024 // (shared + 1024)))
        if best is not None and (tile.pixels(layer) > 256 or resident < min(2, best.resident)):
            break
        best = Plan(tile, nb, wm, 1, mt, nt, resident, shared)
    return best
