"""Steps with convolutions by wgmma: plans anywhere, results on a GPU and in the emulator."""

import pytest
import torch

from recnets.ops.cuda import kernels, plan
from recnets.ops.cuda.plan import Layer, Tile

from .test_cuda_kernels import check_forward_and_every_gradient

# Multiprocessors; tile, warpgroups, buffers; N, H, W, s_in, s_out, d
CASES = [
    (2, Tile(1, 8), 1, 2, (5, 8, 8, 8, 32, 3)),  # tile after tile
    (1, Tile(2, 8), 2, 2, (3, 8, 8, 8, 32, 3)),  # two images, the last one alone
    (1, Tile(2, 8), 1, 1, (3, 8, 8, 4, 16, 3)),  # two patches a warpgroup; segments narrower than a copy
    (2, Tile(1, 8), 2, 2, (2, 16, 16, 16, 64, 2)),  # rows of an image
    (2, Tile(1, 8), 1, 1, (1, 12, 16, 8, 32, 3)),  # the last ones fewer
    (3, Tile(1, 8), 1, 1, (2, 8, 8, 32, 128, 2)),  # two blocks share the channels, and those of dx
    (2, Tile(1, 8), 1, 1, (2, 8, 8, 24, 96, 2)),  # both have all channels of dx
    (2, Tile(1, 8), 1, 2, (2, 8, 8, 12, 48, 2)),
    (2, Tile(1, 8), 1, 2, (2, 8, 8, 64, 64, 2)),  # dx in a launch of its own
    (9, Tile(1, 8), 1, 2, (2, 8, 8, 8, 32, 1)),  # one step, and fewer tiles than blocks
]


@pytest.fixture
def wide(monkeypatch):
    """`wide(tile, groups, buffers, shape)`: both passes of this layer go so until the test ends."""

    def choose(tile: Tile, groups: int, buffers: int, shape: tuple[int, ...]) -> Layer:
        n, h, w, si, so, d = shape
        layer = Layer(n, h, w, d, si, so, 3, 3)
        for name in ("forward", "backward"):
            found = plan.wide_plan_of(name, layer, tile, groups, buffers, 1)
            assert found is not None
            monkeypatch.setitem(plan.overrides, (name, layer), found)
        plan.step.cache_clear()
        return layer

    yield choose
    plan.step.cache_clear()


@pytest.mark.skipif(not (torch.cuda.is_available() and kernels.has_wgmma(0)), reason="needs a GPU with wgmma")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [0, 1000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, batch, dtype, wide, rms):
    *choice, shape = case[1:]
    shape = (shape[0] + batch, *shape[1:])
    wide(*choice, shape)
    check_forward_and_every_gradient((*shape, 3, 3), dtype, rms)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_every_gradient(case, wide, emulated, rms):
    count, *choice, shape = case
    device = emulated(count)
    wide(*choice, shape)
    check_forward_and_every_gradient((*shape, 3, 3), torch.bfloat16, rms, "cpu")
    assert {"forward_wide", "backward_wide"} <= set(device.launched)
