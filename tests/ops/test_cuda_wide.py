"""Weight gradients by wgmma: plans anywhere, the compiled kernels without a GPU, results in the emulator."""

import shutil

import pytest
import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

from recnets.ops import torch as plain
from recnets.ops.cuda import crc, grad_plan, kernels, nvrtc, plan, tuned
from recnets.ops.cuda.plan import Layer, Tile

from .emulator import Emulator
from .test_cuda_kernels import check_forward_and_every_gradient

# Multiprocessors, tile, stages; N, H, W, s_in, s_out, d
SHAPES = [
    (2, Tile(2, 8), 2, (3, 8, 8, 16, 64, 2)),  # two images, the last one alone
    (1, Tile(1, 8), 3, (4, 8, 8, 8, 64, 2)),  # more stages than a block has tiles at the end
    (8, Tile(2, 9), 2, (3, 9, 8, 24, 64, 3)),  # 16 pixels of two images
    (9, Tile(1, 8), 2, (2, 8, 8, 32, 128, 3)),  # blocks of channels, of h and of x; a block without a tile
    (3, Tile(1, 8), 2, (1, 12, 16, 16, 64, 2)),  # the last rows fewer
    (2, Tile(1, 16), 2, (2, 16, 16, 16, 64, 2)),
    (2, Tile(1, 2), 3, (1, 5, 32, 16, 64, 3)),
    (2, Tile(1, 2), 2, (2, 4, 24, 8, 64, 2)),  # 16 pixels of two rows
    (2, Tile(1, 8), 2, (3, 16, 32, 8, 32, 3)),  # two rows of dz at once
    (1, Tile(2, 9), 3, (3, 9, 8, 8, 32, 2)),  # the same of two images, 16 pixels of both and of two rows
    (9, Tile(1, 8), 2, (1, 12, 16, 8, 32, 3)),
    (2, Tile(1, 7), 2, (2, 7, 8, 8, 32, 2)),
]


def gradients(
    layer: Layer, dtype: torch.dtype, device: str = "cpu", *, apart: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Those of W_x and W_h by the kernels, and in float64."""
    torch.manual_seed(0)
    n, h, w, d, si, so, *_ = layer
    x, states = (torch.randn(n, h, w, d * s).to(device, dtype) for s in (si, so))
    dz = torch.randn(d, n, h, w, so).to(device, dtype)
    weights = tuple(torch.empty(so, s, 3, 3, device=device) for s in (si, so))
    rows = plain.apart(x.permute(0, 3, 1, 2), d).permute(0, 2, 3, 1) if apart else x
    got = crc.add_parts(crc.weight_grads(rows, states, dz, layer._replace(apart=apart)), weights)
    xs, hs = (t.double().unflatten(3, (d, -1)).permute(3, 0, 4, 1, 2) for t in (x, states))
    grads = dz.double().permute(0, 1, 4, 2, 3)
    pairs = ((xs, grads), (hs[:-1], grads[1:]))
    expected = [
        sum(
            (conv2d_weight(a, like.shape, g, padding=1) for a, g in zip(*pair, strict=True)),
            torch.zeros((), device=device),
        )
        for pair, like in zip(pairs, weights, strict=True)
    ]
    return got, expected


@pytest.fixture
def planned(monkeypatch):
    """`planned(tile, stages, shape)`: the layer, whose gradients are taken so until the test ends."""

    def choose(tile: Tile, stages: int, shape: tuple[int, ...]) -> Layer:
        n, h, w, si, so, d = shape
        layer = Layer(n, h, w, d, si, so, 3, 3)
        found = grad_plan.wide_grad_plan_of(layer, tile, stages)
        assert found is not None
        for apart in (False, True):
            monkeypatch.setitem(grad_plan.grad_overrides, (layer._replace(apart=apart), so, True), found)
        grad_plan.weight_grad.cache_clear()
        return layer

    yield choose
    grad_plan.weight_grad.cache_clear()


@pytest.fixture
def wide(planned, emulated):
    """`wide(count, tile, stages, shape, …)`: that, and the emulated device that takes them."""

    def start(count: int, *choice, **options) -> tuple[Layer, Emulator]:
        return planned(*choice), emulated(count, **options)

    return start


@pytest.mark.skipif(not (torch.cuda.is_available() and kernels.has_wgmma(0)), reason="needs a GPU with wgmma")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [0, 1000])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_gradients_on_a_gpu(case, batch, dtype, planned, rms):
    _, tile, stages, shape = case
    layer = planned(tile, stages, (shape[0] + batch, *shape[1:]))
    for got, expected in zip(*gradients(layer, dtype, "cuda"), strict=True):
        assert rms(got, expected) < 1e-3  # sums of tensor cores are not rounded to nearest


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_gradients(case, apart, wide, rms):
    layer, device = wide(*case)
    for got, expected in zip(*gradients(layer, torch.bfloat16, apart=apart), strict=True):
        assert rms(got, expected) < 1e-5
    assert device.launched == ["weight_grad_wide", "add_parts"]


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("case", [SHAPES[0], SHAPES[4]], ids=str)
def test_gradients_in_fp16_and_another_order(case, seed, wide, rms):
    layer, _ = wide(*case, seed=seed)
    for got, expected in zip(*gradients(layer, torch.float16), strict=True):
        assert rms(got, expected) < 1e-5


def test_a_layer_in_training(wide, rms):
    _, device = wide(3, Tile(1, 8), 2, (3, 8, 8, 16, 64, 2))
    check_forward_and_every_gradient((3, 8, 8, 16, 64, 2, 3, 3), torch.bfloat16, rms, "cpu")
    assert "weight_grad_wide" in device.launched


def test_one_step_goes_without_it(wide, rms):
    layer, device = wide(2, Tile(1, 8), 2, (2, 8, 8, 16, 64, 1))
    got, expected = gradients(layer, torch.bfloat16)
    assert rms(got[0], expected[0]) < 1e-5
    assert not got[1].any()
    assert "weight_grad_wide" not in device.launched


# What the kernel cannot do without: the emulator must notice that it is missing.
MUTATIONS = {
    "no wait for products": ("wgmma_wait(sums);", ""),
    "nothing to wait for": ("wgmma_commit();", ""),
    "no fence of the sums": ("wgmma_fence(sums);", ""),
    "no wait for copies": ("copy_wait<STAGES - 2>();", ""),
    "a wait for too few copies": ("copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    "no barrier": ("__syncthreads();  // also", "// also"),
    "copies not published": ("publish_shared();", ""),
    "copies published late": ("publish_shared();\n        __syncthreads();", "__syncthreads(); publish_shared();"),
    "a tile overwritten": ("(stage + STAGES - 1) % STAGES", "stage"),
    "rows that follow each other": ("run_a(r + 1) - run_a(r), ", "8, "),
    "offsets for each other": ("run_g(r + 1) - run_g(r), W + 1)", "W + 1, run_g(r + 1) - run_g(r))"),
    "halos not cleared": ("clear_shared(base, STAGES * STAGE);", ""),
    "one warp's products left out": ("wgmma<COLUMNS, false>", "if (warp != 5 || r) wgmma<COLUMNS, false>"),
    "one warp's last products left out": (
        "wgmma<COLUMNS, false>",
        "if (warp != 5 || work + gridDim.x < all) wgmma<COLUMNS, false>",
    ),
    "another warp's products": ("run_a(r) + kx,", "run_a(r) + kx + (warp == 5),"),
}


@pytest.mark.parametrize("shape", [(3, 8, 8, 16, 64, 2), (3, 9, 8, 8, 32, 2)], ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_is_wrong_is_noticed(mutation, shape, wide, rms, tmp_path):
    sources, (right, wrong) = tmp_path / "sources", MUTATIONS[mutation]
    shutil.copytree(nvrtc.FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    kernel = sources / "weight_grad_wide.cu"
    text = kernel.read_text()
    assert text.count(right) == 1
    kernel.write_text(text.replace(right, wrong))
    layer, _ = wide(1, Tile(1, shape[1]), 2, shape, sources=sources)
    message, pairs = "", [([], [])]
    try:
        pairs = list(zip(*gradients(layer, torch.bfloat16), strict=True))
    except RuntimeError as error:
        message = str(error)
    noticed = ": wgmma " in message or "weight_grad_wide, block" in message
    assert noticed or not all(rms(got, expected) < 1e-3 for got, expected in pairs)


# ---- plans ----------------------------------------------------------------------------------------------------------


def wide_plans(layer: Layer) -> list[grad_plan.GradPlan]:
    found = [grad_plan.wide_grad_plan_of(layer, tile, stages) for tile in plan.tiles(layer) for stages in (2, 3)]
    return [each for each in found if each is not None]


def test_plans_that_fit():
    layer = Layer(1024, 16, 16, 10, 16, 64, 3, 3)
    found = wide_plans(layer)
    assert (Tile(1, 16), 2) in [(each.tile, each.stages) for each in found]
    assert {(each.x, each.blocks) for each in found} == {(16, (1, 1))}
    assert {(each.x, each.blocks) for each in wide_plans(Layer(64, 8, 8, 10, 32, 128, 3, 3))} == {(16, (2, 2))}
    assert all(each.shared <= plan.SHARED for each in found)
    assert grad_plan.wide_grad_plan_of(layer, Tile(1, 16), 3) is None  # too much memory


@pytest.mark.parametrize(
    "other",
    [{"so": 96}, {"w": 12}, {"kx": 1}, {"kh": 1}, {"si": 12}, {"si": 32}, {"so": 32}, {"h": 9, "w": 8}],
    ids=str,
)
def test_layers_that_are_left_to_the_other_kernel(other):
    layer = Layer(64, 16, 16, 10, 16, 64, 3, 3)._replace(**other)
    tile = Tile(1, layer.h if "h" in other else 8)
    assert grad_plan.wide_grad_plan_of(layer, tile, 2) is None


def test_it_is_not_chosen_by_itself_nor_where_there_is_no_wgmma(monkeypatch):
    layer = Layer(1000, 16, 16, 10, 16, 64, 3, 3)
    choose = grad_plan.weight_grad.__wrapped__
    before = choose(layer, 64, 3, True, True)
    assert not before.wide
    kept = {"images": 1, "rows": 8, "groups": 4, "stages": 3, "staggered": False, "wide": True}
    monkeypatch.setattr(tuned, "choice", lambda *_: kept)
    assert choose(layer, 64, 3, True, True) == grad_plan.wide_grad_plan_of(layer, Tile(1, 8), 3)
    assert choose(layer, 64, 3, True, False) == choose(layer, 64, 3, True) == before
    assert not choose(layer, 64, 3, False, True).wide
    kept["rows"] = 16  # does not fit three times
    assert choose(layer, 64, 3, True, True) == before


def test_it_is_compiled_for_the_one_architecture_that_has_it():
    files = kernels.FILES["weight_grad_wide"]
    assert nvrtc._target(files, "sm_90") == "sm_90a"
    assert nvrtc._target(kernels.TILES, "sm_90") == "sm_90"
