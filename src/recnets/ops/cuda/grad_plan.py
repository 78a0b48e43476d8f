"""How the gradients of W_x and W_h are cut for weight_grad.cu and weight_grad_wide.cu. Mirrors their constants."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from recnets.ops.cuda import tuned
from recnets.ops.cuda.plan import MOST_COLUMNS, SHARED, Layer, Tile, pitch, round_up, tiles


class GradPlan(NamedTuple):
    """Constants of a weight gradient; `blocks` along (ci, co). `x`: channels of x that come along a block, or 0."""

    tile: Tile
    ci: int
    co: int
    x: int
    groups: int
    stages: int
    shared: int
    blocks: tuple[int, int]
    staggered: bool = False  # groups of warps fetch the next tile at different times
    wide: bool = False  # by weight_grad_wide.cu

    @property
    def kernel(self) -> str:
        return "weight_grad_wide" if self.wide else "weight_grad"

    def defines(self, layer: Layer, channels: int, kernel: int, lag: int) -> dict[str, int]:
        return {
            "H": layer.h, "W": layer.w, "D": layer.d, "SI": layer.si, "SO": layer.so, "IMAGES": self.tile.images,
            "ROWS": self.tile.rows, "NB": layer.so, "WM": kernel, "WN": self.groups, "MT": 1, "NT": 2, "RESIDENT": 1,
            "SINGLE": 0, "STACKED": 0, "CA": channels, "KW": kernel, "LAG": lag, "XB": self.x, "CI_BLOCK": self.ci,
            "CO_BLOCK": self.co, "STAGES": self.stages, "STAGGERED": int(self.staggered), "APART": int(layer.apart),
        }  # fmt: skip


grad_overrides: dict[tuple[Layer, int, bool], GradPlan] = {}
CHANNEL_BLOCKS = {16: (16, 16), 32: (32, 32), 48: (48, 16), 64: (32, 32), 80: (40, 16), 96: (32, 32), 128: (32, 32)}


def grad_plan_of(
    layer: Layer, kernel: int, tile: Tile, ci: int, co: int, x: int, groups: int, stages: int, blocks: tuple[int, int]
) -> GradPlan | None:
    """The plan with these choices, or None where it does not fit."""
    slot = pitch(ci) + (pitch(x) if x else 0)
    stage = tile.slots(layer, kernel) * slot + round_up(tile.pixels(layer), 16) * pitch(co)
    shared = max(stages * stage, kernel * kernel * max(ci, x) * (co + 4) * 4)
    return None if shared > SHARED else GradPlan(tile, ci, co, x, groups, stages, shared, blocks)


def wide_grad_plan_of(layer: Layer, tile: Tile, stages: int) -> GradPlan | None:
    """The plan of both weights' gradients by wgmma, or None where that kernel does not take the layer or the tile."""
    paired = layer.so == 32  # two rows of dz are a product's, else 64 outputs of one
    co = 32 if paired else 64
    blocks = layer.so // co
    runs = tile.images * (tile.rows + paired) * layer.w // 8
    if layer.kx != 3 or layer.kh != 3 or layer.so % co or layer.w % 8 or runs % 2 or layer.si % (8 * blocks):
        return None
    x = layer.si // blocks
    line, line_g = (co + x) // 8 * (layer.w + 3), co // 8 * (layer.w + 1)
    stage = tile.images * ((tile.rows + 2) * line + (tile.rows + 2 * paired) * line_g) * 16
    if (co + x) * (2 if paired else 1) > MOST_COLUMNS or stages * stage > SHARED:
        return None
    # Three rows or columns of taps, each a warpgroup of four warps.
    return GradPlan(tile, co, co, x, 4, stages, stages * stage, (blocks, blocks), wide=True)


def _tuned_grad(
    layer: Layer, kernel: int, ci: int, co: int, x: int, blocks: tuple[int, int], wgmma: bool
) -> GradPlan | None:
    """The plan that was measured to be the fastest, where there is one and it fits these kernels."""
    kept = tuned.choice("weight_grad", layer, 0)
    if kept is None or (kept["wide"] and not wgmma):
        return None
    tile = Tile(kept["images"], kept["rows"])
    if kept["wide"]:
        return wide_grad_plan_of(layer, tile, kept["stages"])
    plan = grad_plan_of(layer, kernel, tile, ci, co, x, kept["groups"], kept["stages"], blocks)
    return plan and plan._replace(staggered=kept["staggered"])


@cache
def weight_grad(layer: Layer, channels: int, kernel: int, along: bool, wgmma: bool = False) -> GradPlan | None:
    """The plan of the gradient of a kernel over `channels` input channels a step.

    `along` takes W_x's gradient along with W_h's; None where that is not possible. `wgmma`: the device has it.
    """
    if (layer, channels, along) in grad_overrides:
        return grad_overrides[layer, channels, along]
    if layer.so not in CHANNEL_BLOCKS:
        return None
    padded = round_up(channels, 8)
    ci, co = CHANNEL_BLOCKS[layer.so]
    if padded % ci:
        ci = max(c for c in range(8, 33, 8) if padded % c == 0)
    blocks, x = (padded // ci, layer.so // co), 0
    if along:
        x = round_up(layer.si, 8) if blocks[0] == 1 else layer.si // blocks[0]
        if layer.kx != layer.kh or x % 8 or layer.si % blocks[0] or kernel * (ci + x) * co // 32 > 128:
            return None
    kept = _tuned_grad(layer, kernel, ci, co, x, blocks, wgmma) if along else None
    if kept is not None:
        return kept
    best: GradPlan | None = None
    for tile in tiles(layer):
        plan = grad_plan_of(layer, kernel, tile, ci, co, x, 4 if kernel == 3 else 8, 2, blocks)
        if plan is None or (best is not None and tile.pixels(layer) > 256):
            break
        best = plan
    return best
