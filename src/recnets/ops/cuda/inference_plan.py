"""How a Recurrent module is cut for inference.cu: clusters, tiles, warps, shared memory. Mirrors its constants."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from recnets.ops.cuda.nvrtc import PORTABLE_CLUSTER
from recnets.ops.cuda.plan import SHARED, Layer, cdiv, packed_bytes, pitch, round_up

LARGEST_CLUSTER = 16  # more than the portable 8 blocks must be asked for: only where nothing else fits
# Clusters of this many blocks, one a multiprocessor, that a device of 132 holds at once: they do not cross its parts
# of 16 or 18 multiprocessors.
AT_ONCE = {1: 132, 2: 66, 3: 42, 4: 32, 5: 24, 6: 20, 7: 16, 8: 16, 9: 13, 10: 12, 12: 8, 14: 8, 15: 8, 16: 7}
REGISTERS = 65536
BARRIERS = 16  # bytes
OTHER_REGISTERS = 44  # addresses, fragments on their way


class Module(NamedTuple):
    """A Recurrent module on a batch."""

    layer: Layer
    c_out: int
    pool: bool


class Warps(NamedTuple):
    """WM x WN warps with MT x NT tiles of 16 pixels and 8 channels each."""

    wm: int
    wn: int
    mt: int
    nt: int

    @property
    def warps(self) -> int:
        return self.wm * self.wn

    @property
    def registers(self) -> int:
        return self.mt * self.nt * 4


class InferencePlan(NamedTuple):
    images: int
    rows: int
    nb: int
    conv: Warps
    last: Warps
    buffers: int
    resident: int
    cluster: int
    shared: int
    cost: float

    @property
    def registers(self) -> int:
        """Of accumulators."""
        return self.conv.registers + self.last.registers

    def defines(self, module: Module) -> dict[str, int]:
        layer = module.layer
        return {
            "H": layer.h, "W": layer.w, "D": layer.d, "SI": layer.si, "SO": layer.so, "KX": layer.kx, "KH": layer.kh,
            "IMAGES": self.images, "ROWS": self.rows, "NB": self.nb,
            "WM": self.conv.wm, "WN": self.conv.wn, "MT": self.conv.mt, "NT": self.conv.nt,
            "TWM": self.last.wm, "TWN": self.last.wn, "TMT": self.last.mt, "TNT": self.last.nt,
            "C_OUT": module.c_out, "POOL": int(module.pool), "BUFFERS": self.buffers, "RESIDENT": self.resident,
            "SINGLE": 0, "STACKED": 0,
        }  # fmt: skip

    def __str__(self) -> str:
        c, t = self.conv, self.last
        return (
            f"cluster {self.cluster} {self.images}x{self.rows} rows nb {self.nb} conv {c.wm}x{c.wn} of {c.mt}x{c.nt} "
            f"last {t.wm}x{t.wn} of {t.mt}x{t.nt} buffers {self.buffers} resident {self.resident} "
            f"shared {self.shared // 1024}K acc {self.registers}"
        )


def units(layer: Layer, images: int, rows: int, mt: int) -> int:
    """Warps side by side in pixels: `Place::UNITS`."""
    strips = images * (rows // mt)
    return strips * cdiv(layer.w, 16) if layer.w > 8 else cdiv(strips, 2)


def shared_bytes(layer: Layer, images: int, rows: int, nb: int, last: Warps, buffers: int) -> int:
    slots = (images * (rows + 1) + 1) * (layer.w + 1) + 1
    weights = packed_bytes(layer.si, layer.kx, nb) + packed_bytes(layer.so, layer.kh, nb)
    matrix = layer.so // 16 * last.wn * last.nt * 256
    return weights + matrix + buffers * slots * (pitch(layer.si) + pitch(layer.so)) + BARRIERS


def _conv_warps(layer: Layer, images: int, rows: int, nb: int, most: int) -> Iterator[Warps]:
    for mt in (1, 2, 4, 8):
        if rows % mt:
            continue
        wm = units(layer, images, rows, mt)
        for wn in range(1, most // wm + 1 if wm <= most else 0):
            if (nb // 8) % wn == 0 and mt * nb // 8 // wn <= 16:
                yield Warps(wm, wn, mt, nb // 8 // wn)


def _last_warps(module: Module, images: int, rows: int, splits: int, most: int) -> Iterator[Warps]:
    tiles = cdiv(cdiv(module.c_out, 8), splits)
    for mt in (1, 2, 4, 8):
        if rows % mt or (module.pool and mt % 2):
            continue
        wm = units(module.layer, images, rows, mt)
        for wn in range(1, most // wm + 1 if wm <= most else 0):
            nt = cdiv(tiles, wn)
            if (wn - 1) * nt < tiles and mt * nt <= 46:
                yield Warps(wm, wn, mt, nt)


def _wavefronts(channels: int, kernel: int, w: Warps) -> int:
    """Reads of shared memory of 128 bytes of a warp's convolution."""
    weights = 2 * w.nt if w.nt % 2 == 0 else 4 * w.nt
    if kernel == 3 and round_up(channels, 8) % 16 == 0:
        return 3 * (round_up(channels, 8) // 16) * (4 * (w.mt + 2) + 3 * weights)
    return cdiv(kernel * kernel * round_up(channels, 8), 16) * (4 * w.mt + weights)


def _products(layer: Layer, w: Warps) -> int:
    x = cdiv(layer.kx**2 * round_up(layer.si, 8), 16)
    return w.mt * w.nt * (x + cdiv(layer.kh**2 * layer.so, 16))


def step_cost(
    layer: Layer, images: int, rows: int, nb: int, conv: Warps, last: Warps, buffers: int, resident: int
) -> float:
    """Cycles of a step, by a rough model: what the blocks of a multiprocessor ask of it, or what one waits for."""
    k = layer.so // 16
    loads: float = conv.warps * (_wavefronts(layer.si, layer.kx, conv) + _wavefronts(layer.so, layer.kh, conv))
    loads += conv.warps * 2 * conv.mt * conv.nt
    products: float = conv.warps * _products(layer, conv)
    # Two warps a scheduler hide each other's waits; y in few warps leaves the others idle.
    idle = 1 + (1 - last.warps / conv.warps)
    loads += idle * last.warps * k * (4 * last.mt + 2 * last.nt)
    products += idle * last.warps * last.mt * last.nt * k
    # Warps that do not fill the four schedulers evenly leave some idle.
    busy = cdiv(conv.warps * resident, 4) / (conv.warps * resident / 4)
    tensor = products / 4 * 5 * busy
    throughput = resident * (max(loads, tensor) + 0.25 * min(loads, tensor))
    steps = cdiv(layer.kh**2 * layer.so, 16) + cdiv(layer.kx**2 * round_up(layer.si, 8), 16)
    # A product takes 33 cycles until its sum can be used, and a scheduler's tensor cores about 6.
    together = cdiv(conv.warps, 4)
    chain = 33 * (conv.mt + 2) / 3 if conv.mt > 1 else 33.0
    if conv.mt * conv.nt <= 4:
        chain = 11.0  # three sets of sums
    alone = steps * max(chain, 6 * conv.mt * conv.nt * together)
    alone += k * max(33, 6 * last.mt * last.nt * cdiv(last.warps, 4)) + 500
    splits, row_splits = layer.so // nb, cdiv(layer.h, rows)
    pixels = images * min(rows, layer.h) * layer.w
    remote = (splits - 1) * pixels * nb * 2 + (2 * splits * layer.w * nb * 2 if row_splits > 1 else 0)
    cost = max(throughput, alone) + resident * remote / 12 + (600 if buffers == 2 else 1300)
    # With most registers taken by accumulators, loads cannot run ahead.
    return cost * (1 + max(0, conv.registers + last.registers - 150) / 1500)


def _cuts(module: Module, largest: int) -> Iterator[tuple[int, int, int]]:
    """(channels of h a block, images, rows)."""
    layer = module.layer
    whole = {round_up(layer.h, m) for m in (2, 4)} | ({layer.h} if not module.pool else set())
    for splits in (1, 2, 3, 4, 6, 8):
        if layer.so % (16 * splits):
            continue
        for rows in (1, 2, 4, 8, 16, 32):
            if rows < layer.h and cdiv(layer.h, rows) * splits <= largest:
                yield layer.so // splits, 1, rows
        for images in (1, 2, 3, 4, 6, 8):
            for rows in sorted(whole):
                yield layer.so // splits, images, rows


def candidates(module: Module, multiprocessors: int = 132, largest: int = PORTABLE_CLUSTER) -> list[InferencePlan]:
    """All plans that fit, the best first."""
    layer = module.layer
    if layer.so % 16 or layer.so > 128 or layer.si % 4 or module.c_out % 4:
        return []
    if layer.kx not in (1, 3) or layer.kh not in (1, 3) or layer.w > 64 or (module.pool and min(layer.h, layer.w) < 2):
        return []
    found = []
    for nb, images, rows in _cuts(module, largest):
        splits = layer.so // nb
        cluster = splits * cdiv(layer.h, rows)
        if cluster not in AT_ONCE:
            continue
        groups = cdiv(layer.n, images)
        if images > 1 and images // 2 >= layer.n:
            continue
        for resident, most in ((1, 8), (2, 4), (2, 8)):
            conv_warps = list(_conv_warps(layer, images, rows, nb, most))
            for last in _last_warps(module, images, rows, splits, most):
                for buffers in (2, 1):
                    # A warp with no row of the map sends nothing, so that no other block would know what it has read.
                    if buffers == 2 and splits > 1 and layer.h % rows:
                        continue
                    shared = shared_bytes(layer, images, rows, nb, last, buffers)
                    if shared > SHARED // resident - 1024 * (resident - 1):
                        continue
                    for conv in conv_warps:
                        if last.warps > conv.warps or conv.warps > most or (conv.warps * 2 <= most and resident == 2):
                            continue
                        registers = min(255, REGISTERS // (conv.warps * 32 * resident) // 8 * 8)
                        # Fragments of three taps, or of the pixels of y; addresses of other blocks.
                        temporary = max(6 * conv.nt, 4 * last.mt) + 6 * (splits > 1) + 6 * (1 < splits < cluster)
                        if conv.registers + last.registers + temporary + OTHER_REGISTERS > registers:
                            continue
                        at_once = max(1, AT_ONCE[cluster] * multiprocessors // 132) * resident
                        rounds = cdiv(groups, at_once)
                        crowd = min(resident, max(1, cdiv(groups * cluster, multiprocessors)))
                        step = step_cost(layer, images, rows, nb, conv, last, buffers, crowd)
                        start = 2000 + (shared - buffers * 1000) / 40
                        cost = rounds * layer.d * step + start
                        shape = (images, rows, nb, conv, last, buffers, resident, cluster)
                        found.append(InferencePlan(*shape, shared, round(cost)))
    return sorted(found, key=lambda plan: (plan.cost, plan.cluster, -plan.buffers))


@cache
def inference(module: Module, multiprocessors: int) -> InferencePlan | None:
    """The plan, or None where the module does not fit."""
    found = candidates(module, multiprocessors) or candidates(module, multiprocessors, LARGEST_CLUSTER)
    return found[0] if found else None
