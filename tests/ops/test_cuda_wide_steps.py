"""Steps with convolutions by wgmma: plans anywhere, results on a GPU and in the emulator."""

import shutil

import pytest
import torch

from recnets.ops.cuda import kernels, nvrtc, plan
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

    def choose(tile: Tile, groups: int, buffers: int, shape: tuple[int, ...], apart: bool = False) -> Layer:
        n, h, w, si, so, d = shape
        layer = Layer(n, h, w, d, si, so, 3, 3, apart)
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


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_segments_apart(case, wide, emulated, rms):
    count, *choice, shape = case
    device = emulated(count)
    wide(*choice, shape, apart=True)
    check_forward_and_every_gradient((*shape, 3, 3), torch.bfloat16, rms, "cpu", apart=True)
    assert {"forward_wide", "backward_wide"} <= set(device.launched)


@pytest.mark.skipif(not (torch.cuda.is_available() and kernels.has_wgmma(0)), reason="needs a GPU with wgmma")
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_segments_apart_on_a_gpu(case, wide, rms):
    *choice, shape = case[1:]
    wide(*choice, shape, apart=True)
    check_forward_and_every_gradient((*shape, 3, 3), torch.bfloat16, rms, apart=True)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_in_fp16_and_another_order(case, seed, wide, emulated, rms):
    count, *choice, shape = case
    emulated(count, seed=seed)
    wide(*choice, shape)
    check_forward_and_every_gradient((*shape, 3, 3), torch.float16, rms, "cpu")


# What the kernels cannot do without: the emulator must notice that it is missing.
PRODUCTS = {
    "no wait for products": ("wgmma_wait(acc);", ""),
    "nothing to wait for": ("wgmma_commit();", ""),
    "no fence of the sums": ("wgmma_fence(acc);", ""),
    "no barrier": ("__syncthreads();  // also", "// also"),
    "stores not published": ("publish_shared();", ""),
    "stores published late": ("publish_shared();\n            __syncthreads();", "__syncthreads(); publish_shared();"),
    "a tile overwritten": ("buffer ^ 1", "buffer"),
    "a tile overwritten where there is one buffer": ("if (BUFFERS == 2) prepare();", "prepare();"),
    "no barrier before the store": ("__syncthreads();\n            if (BUFFERS == 1)", "if (BUFFERS == 1)"),
    "no wait for the other blocks": ("await(counters + i", "(void)(counters + i"),
    "tiles in another order than they are fetched": (
        "t + walk.by, batch), batch);\n        };",
        "t, batch), batch);\n        };",
    ),
}
THEN = "\n            __syncthreads();\n            u16* out"
MUTATIONS = {
    **{("forward", name): ("forward_wide.cu", *change) for name, change in PRODUCTS.items()},
    **{("backward", name): ("backward_wide.cu", *change) for name, change in PRODUCTS.items()},
    ("forward", "border not cleared"): ("forward_wide.cu", "clear_shared(xs, BUFFERS * (BYTES_X + BYTES_H));", ""),
    ("forward", "no wait for copies"): ("forward_wide.cu", "copy_wait<0>();", ""),
    ("forward", "no barrier after clearing"): ("forward_wide.cu", "map\n    __syncthreads();", "map\n"),
    ("forward", "the next step's x"): ("forward_wide.cu", "x_step(more ? i : i + 1, batch)", "x_step(i, batch)"),
    ("backward", "border not cleared"): ("backward_wide.cu", "clear_shared(hs, BUFFERS * BYTES_H);", ""),
    ("backward", "no wait for dh and z"): ("backward_wide.cu", f"copy_wait<0>();{THEN}", THEN),
    ("backward", "no barrier after dh and z"): ("backward_wide.cu", THEN, "\n            u16* out"),
    ("backward", "the other m"): ("backward_wide.cu", "masked + (i & 1) * plane", "masked"),
    ("both", "a half of the last product twice"): ("planes.cuh", "2 * j : TAPS - 2", "2 * j : TAPS - 1"),
    ("both", "taps for rows"): ("planes.cuh", "o1 - o0, COLUMNS", "COLUMNS, o1 - o0"),
    ("both", "columns apart"): ("planes.cuh", "T * 8, 8)", "T * 8, 16)"),
}  # fmt: skip


@pytest.mark.parametrize(("which", "mutation"), MUTATIONS, ids=lambda part: part)
def test_what_is_wrong_is_noticed(which, mutation, wide, emulated, rms, tmp_path):
    sources, (file, right, wrong) = tmp_path / "sources", MUTATIONS[which, mutation]
    shutil.copytree(nvrtc.FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (sources / file).read_text()
    assert text.count(right) >= 1
    (sources / file).write_text(text.replace(right, wrong, 1))
    count, tile, groups, buffers, shape = CASES[0]
    emulated(count, sources=sources)
    wide(tile, groups, 1 if "one buffer" in mutation else buffers, shape)
    with pytest.raises((AssertionError, RuntimeError)):
        check_forward_and_every_gradient((*shape, 3, 3), torch.bfloat16, rms, "cpu")


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_plans_that_fit(name):
    layer = Layer(1024, 32, 32, 10, 8, 32, 3, 3)
    chosen = plan.wide_plan_of(name, layer, Tile(1, 8), 2, 2, 2)
    assert (chosen.wm, chosen.wn, chosen.mt, chosen.nt) == (8, 1, 2, 4)
    assert 2 * (chosen.shared + 1024) <= plan.SHARED + 1024
    assert plan.wide_plan_of(name, layer, Tile(1, 8), 2, 2, 3) is None  # too much memory
    assert plan.wide_plan_of(name, layer, Tile(1, 8), 3, 2, 1) is None  # 4 patches are not for 3 warpgroups
    assert plan.wide_plan_of(name, layer, Tile(1, 4), 1, 2, 1) is None  # half patches


@pytest.mark.parametrize("other", [{"w": 12}, {"kx": 1}, {"kh": 1}, {"si": 6}], ids=str)
def test_layers_that_are_left_to_the_other_kernels(other):
    layer = Layer(64, 16, 16, 10, 8, 32, 3, 3)._replace(**other)
    for name in ("forward", "backward"):
        assert plan.wide_plan_of(name, layer, Tile(1, 8), 1, 1, 1) is None


def test_segments_wider_than_states_are_left_to_the_other_backward():
    layer = Layer(64, 16, 16, 10, 32, 16, 3, 3)
    assert plan.wide_plan_of("forward", layer, Tile(1, 8), 1, 1, 1) is not None
    assert plan.wide_plan_of("backward", layer, Tile(1, 8), 1, 1, 1) is None


def test_they_are_not_chosen_by_themselves():
    for wgmma in (False, True):
        assert not plan.step("forward", Layer(1000, 16, 16, 10, 16, 64, 3, 3), 132, wgmma).wide
