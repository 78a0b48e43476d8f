"""The CUDA kernels on the CPU, by the emulator: results against the naive loop, in any order of their threads."""

import copy

import pytest
import torch
import torch.nn.functional as F

from recnets import create_model
from recnets.layers import CRC, Recurrent
from recnets.layers.crc import NONLINEARITIES
from recnets.layers.norm import norm_of
from recnets.ops import dispatch
from recnets.ops.cuda import crc, grad_plan, inference, inference_plan, norm_relu, plan
from recnets.ops.cuda.inference import EvalNorm
from recnets.ops.cuda.plan import Layer

from .test_cuda_inference import module_and_input
from .test_cuda_kernels import check_forward_and_every_gradient
from .test_cuda_maps import check_output_and_every_gradient
from .test_triton import check_layer

# Multiprocessors; N, H, W, s_in, s_out, d, kernel_x, kernel_h
SHAPES = [
    (3, (3, 8, 8, 8, 32, 3, 3, 3)),  # an image a block
    (8, (2, 9, 7, 12, 48, 3, 3, 3)),  # rows of an image, the last ones fewer
    (3, (5, 5, 6, 12, 48, 3, 1, 3)),  # two images, the last one alone; dx and W_x apart
    (4, (2, 12, 10, 8, 32, 3, 3, 1)),
    (2, (2, 6, 6, 4, 16, 4, 3, 3)),  # segments narrower than a copy
    (2, (2, 4, 4, 8, 32, 1, 3, 3)),  # one step
    (2, (2, 5, 5, 16, 64, 3, 3, 3)),  # the weight gradient's channels in blocks
    (4, (2, 4, 4, 24, 96, 3, 3, 3)),  # two blocks share the channels, one has dx
    (8, (2, 8, 4, 32, 128, 2, 3, 3)),  # and rows
    (6, (3, 8, 8, 32, 128, 2, 3, 3)),  # they share those of dx too
    (3, (5, 4, 4, 32, 128, 2, 3, 3)),  # more tiles than blocks; dx does not fit
    (3, (5, 4, 4, 64, 128, 2, 1, 1)),
    (3, (9, 5, 6, 24, 96, 2, 1, 1)),  # no registers to fetch ahead in the backward pass
    (2, (3, 12, 12, 12, 48, 2, 3, 3)),  # rows of an image, some of them the next tile
    (2, (2, 20, 20, 16, 64, 2, 3, 3)),
    (1, (7, 8, 8, 12, 48, 3, 1, 3)),  # one block alone, and more for the blocks of dx than one tile and step each
    (8, (2, 4, 4, 32, 128, 3, 3, 3)),  # more warps than dx has tiles of 8 channels in a block's share
]


# Whole layers take Triton's kernels too, for running statistics.
interpreted = pytest.mark.skipif(not (dispatch.AVAILABLE and dispatch.INTERPRETED), reason="needs Triton's interpreter")


def way(chosen: plan.Plan) -> str:
    return "single" if chosen.single else "prefetch" if chosen.prefetch else "neither"


def test_shapes_take_every_way_through_the_kernels():
    found = set()
    for count, (n, h, w, s_in, s_out, d, kernel_x, kernel_h) in SHAPES:
        layer = Layer(n, h, w, d, s_in, s_out, kernel_x, kernel_h)
        for kind in ("forward", "backward"):
            chosen = plan.step(kind, layer, count)
            assert chosen is not None
            found |= {(kind, way(chosen)), (way(chosen), "split", s_out > chosen.nb)}
            found |= {(way(chosen), "rows", chosen.tile.rows < h), (way(chosen), "full", n % chosen.tile.images == 0)}
        found |= {("dx", chosen.dx_tiles > 0, chosen.dx_split)}
        found |= {("along", grad_plan.weight_grad(layer, s_out, kernel_h, True) is not None)}
    for name in ("single", "prefetch"):
        assert found >= {("forward", name), ("backward", name)}
        assert found >= {(name, what, yes) for what in ("split", "rows", "full") for yes in (False, True)}
    assert found >= {("dx", False, False), ("dx", True, False), ("dx", True, True), ("along", False), ("along", True)}


@pytest.mark.parametrize(("count", "shape"), SHAPES, ids=str)
def test_forward_and_every_gradient(count, shape, emulated, rms):
    emulated(count)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu")


@pytest.mark.parametrize(("count", "shape"), SHAPES[2:11:4], ids=str)
def test_fp16(count, shape, emulated, rms):
    emulated(count)
    check_forward_and_every_gradient(shape, torch.float16, rms, "cpu")


@pytest.mark.parametrize(("count", "shape"), [each for each in SHAPES if each[1][5] > 1], ids=str)
def test_segments_apart(count, shape, emulated, rms):
    emulated(count)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu", apart=True)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("count", "shape"), [SHAPES[10], SHAPES[13]], ids=str)
def test_nothing_fetched_ahead(count, shape, apart, emulated, rms, monkeypatch):
    emulated(count)
    planned = plan.step
    monkeypatch.setattr(plan, "step", lambda *args: planned(*args)._replace(prefetch=False))
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu", apart=apart)


@pytest.mark.parametrize(("batch", "relu"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("count", "shape"), [SHAPES[1], SHAPES[10]], ids=str)
def test_known_statistics_and_linear_recursion(count, shape, batch, relu, emulated, rms):
    emulated(count)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu", batch=batch, relu=relu)


@interpreted
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_every_nonlinearity_of_a_layer(nonlinearity, frozen, emulated):
    device = emulated(4)
    torch.use_deterministic_algorithms(False)  # else Triton's kernels run
    check_layer((2, 9, 7, 12, 48, 3, 3, 3), torch.bfloat16, 1e-2, nonlinearity=nonlinearity, frozen=frozen)
    assert {"forward", "backward", "weight_grad"} <= set(device.launched)
    assert ("norm_relu_forward" in device.launched) == (nonlinearity == "linear" and not frozen)


@interpreted
@pytest.mark.parametrize("forward", [False, True])
def test_one_pass_by_the_kernels_in_triton(forward, emulated, rms):
    """Determinism may be asked for, or no longer, between a forward pass and its backward pass."""
    emulated(4)
    torch.manual_seed(0)
    layer = CRC(8, 32, 3, backend="triton")
    x = torch.randn(2, 24, 6, 6)
    grads = []
    for by_turns in (False, True):
        again, leaf = copy.deepcopy(layer), x.half().requires_grad_()
        torch.use_deterministic_algorithms(forward)
        out = again(leaf)
        torch.use_deterministic_algorithms(forward != by_turns)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).half())
        grads.append([leaf.grad, *(p.grad for p in again.parameters())])
    torch.use_deterministic_algorithms(False)
    for one, other in zip(*grads, strict=True):
        assert rms(one, other) < 2e-2


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype(dtype, emulated):
    emulated(4)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(dtype)
    try:
        layer = CRC(4, 16, 2, backend="triton").float()
        layer(torch.randn(2, 8, 5, 5).bfloat16()).float().sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.norm.running_var.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# More warps, more blocks a multiprocessor, fewer channels a block than the chosen plans have.
OTHER_PLANS = [
    (1, 64, 4, 16, "prefetch"), (2, 64, 2, 8, "prefetch"), (2, 32, 4, 8, "single"), (2, 32, 2, 8, "neither"),
    (2, 16, 8, 8, "single"), (3, 16, 1, 4, "prefetch"),
]  # fmt: skip


@pytest.mark.parametrize(("resident", "nb", "rows", "most", "kind"), OTHER_PLANS, ids=str)
def test_plans_that_are_not_chosen(resident, nb, rows, most, kind, emulated, rms, monkeypatch):
    shape = (2, 8, 16, 16, 64, 2, 3, 3)
    layer = Layer(*shape[:3], 2, 16, 64, 3, 3)
    for name in ("forward", "backward"):
        warps = plan.warps(rows * 16, nb, most=most, largest=8)
        assert warps is not None
        found = plan.plan_of(name, layer, plan.Tile(1, rows), nb, warps, 1)
        assert found is not None
        ways = {"single": kind == "single", "prefetch": kind == "prefetch"}
        monkeypatch.setitem(plan.overrides, (name, layer), found._replace(resident=resident, **ways))
    plan.step.cache_clear()
    emulated(4)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu")
    plan.step.cache_clear()


# Multiprocessors, the way through the kernels; N, H, W, s_in, s_out, d, kernel_x, kernel_h
STACKS = [
    (3, "single", (3, 8, 8, 8, 32, 3, 3, 3)),  # 8 columns of two strips
    (6, "single", (3, 8, 8, 32, 128, 2, 3, 3)),
    (1, "prefetch", (7, 8, 8, 12, 48, 3, 1, 3)),  # dx apart
    (4, "single", (2, 8, 16, 16, 64, 2, 3, 3)),
    (4, "single", (2, 13, 16, 12, 48, 2, 3, 3)),  # rows of an image, the last ones fewer
    (3, "prefetch", (2, 12, 16, 12, 48, 2, 3, 3)),
    (8, "single", (2, 16, 32, 4, 16, 3, 3, 3)),  # two stacks side by side
    (1, "prefetch", (2, 16, 32, 8, 32, 2, 3, 3)),
    (1, "neither", (2, 16, 32, 8, 32, 2, 3, 3)),
]


@pytest.mark.parametrize(("count", "kind", "shape"), STACKS, ids=str)
def test_tiles_of_a_warp_below_each_other(count, kind, shape, emulated, rms, monkeypatch):
    emulated(count)
    planned, stacked = plan.step, set()

    def stack(name, layer, multiprocessors, wgmma=False):
        chosen = planned(name, layer, multiprocessors, wgmma)
        if kind == "neither":
            chosen = chosen._replace(prefetch=False)
        assert plan.stackable(chosen, layer)
        assert way(chosen) == kind
        stacked.add((name, chosen.mt))
        return chosen._replace(stacked=True)

    monkeypatch.setattr(plan, "step", stack)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu")
    assert {name for name, _ in stacked} == {"forward", "backward"}


def test_what_cannot_be_stacked():
    layer = Layer(2, 16, 32, 3, 8, 32, 3, 3)
    chosen = plan.step("forward", layer, 132)
    assert plan.stackable(chosen, layer)
    assert not plan.stackable(chosen, layer._replace(kh=1))
    assert not plan.stackable(chosen._replace(mt=3), layer)
    for w, rows in ((20, 8), (4, 8)):
        narrow = Layer(2, 8, w, 3, 8, 32, 3, 3)
        assert not plan.stackable(chosen._replace(tile=plan.Tile(1, rows), wm=1, mt=rows * w // 16), narrow)


# Groups of warps, stages; with more groups than turns of a tile some fetch at the same time.
@pytest.mark.parametrize(("groups", "stages"), [(4, 2), (4, 3), (5, 2), (8, 3)])
@pytest.mark.parametrize(
    ("count", "shape"), [(2, (3, 12, 12, 12, 48, 2, 3, 3)), (3, (5, 8, 8, 16, 64, 2, 3, 3))], ids=str
)
def test_weight_gradients_whose_warps_fetch_by_turns(count, shape, groups, stages, emulated, rms, monkeypatch):
    n, h, w, s_in, s_out, d, kernel, _ = shape
    layer = Layer(n, h, w, d, s_in, s_out, kernel, kernel)
    chosen = grad_plan.weight_grad(layer, s_out, kernel, True)
    assert chosen is not None
    cut = (layer, kernel, chosen.tile, chosen.ci, chosen.co, chosen.x, groups, stages, chosen.blocks)
    found = grad_plan.grad_plan_of(*cut)
    assert found is not None
    monkeypatch.setitem(grad_plan.grad_overrides, (layer, s_out, True), found._replace(staggered=True))
    grad_plan.weight_grad.cache_clear()
    emulated(count, seed=groups)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu")
    grad_plan.weight_grad.cache_clear()


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("count", "shape"), [SHAPES[1], SHAPES[8], SHAPES[10], SHAPES[13]], ids=str)
def test_threads_in_another_order(count, shape, seed, emulated, rms):
    emulated(count, seed=seed)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, "cpu")


# Multiprocessors; N, H, W, C; is a block's share kept, forwards and backwards?
MAPS = [(4, (3, 6, 8, 40), (True, True)), (3, (5, 7, 9, 120), (True, True)), (1, (9, 16, 16, 40), (True, False)),
        (1, (12, 16, 16, 40), (False, False)), (2, (2, 4, 4, 720), (True, True)),
        (2, (2, 4, 4, 1280), (True, True)), (1, (2, 10, 10, 2048), (False, False))]  # fmt: skip


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("count", "shape", "kept"), MAPS, ids=str)
def test_maps(count, shape, kept, pool, emulated, rms):
    emulated(count)
    n, h, w, channels = shape
    for backward in (False, True):
        units = n * (h // 2) * (w // 2) if pool else n * h * w
        assert norm_relu.map_plan(units, channels, pool, backward, count).keep == kept[backward]
    check_output_and_every_gradient(shape, pool, torch.float16 if pool else torch.bfloat16, rms, "cpu")


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("count", "shape", "segments"), [
    (4, (3, 6, 8, 40), 5), (3, (4, 6, 8, 48), 3), (1, (12, 16, 16, 80), 10), (1, (12, 16, 16, 80), 1),
], ids=str)  # fmt: skip
def test_maps_of_segments(count, shape, segments, pool, emulated, rms):
    emulated(count)
    check_output_and_every_gradient(shape, pool, torch.bfloat16, rms, "cpu", segments)


@interpreted
@pytest.mark.parametrize("hook", [False, True])
def test_segments_pass_apart_through_a_network(hook, emulated, rms, monkeypatch):
    emulated(4)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    model = create_model("RecNet(4, 8, 16, 3, 2)", num_classes=5, backend="triton").train()
    images = torch.randn(3, 3, 8, 8)
    given, forward = [], crc.forward

    def note(*args, layer: Layer, **options):
        given.append(layer.d if layer.apart else 1)
        return forward(*args, layer=layer, **options)

    monkeypatch.setattr(crc, "forward", note)
    results = []
    for apart in (False, True):
        monkeypatch.setattr(dispatch, "APART", apart)
        again = copy.deepcopy(model)
        if hook:
            again.stages[1][0].crc.register_forward_hook(lambda *_: None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(again(images), torch.tensor([0, 3, 1]))
        loss.backward()
        results.append([loss, *(p.grad for p in again.parameters()), *again.buffers()])
    assert given == [1] * 4 + ([1] * 4 if hook else [3, 3, 2, 2])
    for one, other in zip(*results, strict=True):
        assert rms(one, other) < 1e-3


# Blocks a cluster, blocks that share the channels, buffers; N, H, W, s_in, s_out, d, c_out, pool, kernel_x, kernel_h
MODULES = [
    (1, 1, 2, (11, 8, 8, 8, 32, 3, 40, False, 3, 3)),  # four images at a time, the last three
    (1, 1, 1, (9, 8, 8, 8, 32, 3, 40, True, 3, 3)),
    (1, 1, 2, (7, 4, 4, 8, 32, 3, 24, False, 3, 3)),
    (2, 2, 2, (17, 4, 4, 8, 32, 3, 24, False, 3, 3)),  # channels
    (2, 2, 2, (7, 4, 4, 24, 96, 2, 36, False, 3, 3)),
    (4, 1, 2, (3, 8, 8, 8, 32, 3, 40, True, 3, 3)),  # rows
    (4, 1, 1, (3, 8, 8, 8, 32, 3, 40, False, 3, 3)),
    (4, 2, 2, (3, 8, 8, 8, 32, 3, 40, False, 3, 3)),  # rows and channels
    (4, 2, 1, (3, 8, 8, 8, 32, 3, 40, True, 3, 3)),
    (8, 2, 2, (2, 8, 8, 8, 32, 3, 40, True, 3, 3)),
    (4, 4, 2, (2, 8, 8, 32, 128, 2, 64, False, 3, 3)),
    (3, 1, 2, (2, 9, 13, 12, 48, 3, 36, True, 3, 3)),  # the last rows fewer, a row of 13
    (6, 3, 1, (2, 9, 13, 12, 48, 3, 36, True, 3, 3)),
    (3, 1, 2, (2, 12, 12, 8, 32, 3, 40, True, 1, 3)),
    (6, 2, 2, (2, 12, 12, 8, 32, 3, 40, False, 3, 1)),
    (2, 1, 2, (3, 16, 24, 4, 16, 1, 20, True, 3, 3)),  # one step
]


def check_inference(cluster, splits, buffers, shape, dtype, rms, monkeypatch) -> None:
    pool, d = shape[7], shape[5]
    module, x = module_and_input(shape, dtype, "cpu")
    crc, last = module.crc, module.transition.norm
    rows, matrix = x.permute(0, 2, 3, 1), module.transition.conv.weight.flatten(1).detach()
    found = inference_plan.candidates(inference.module_of(rows, crc.weight_x, crc.weight_h, matrix, d, pool), cluster)
    chosen = next(p for p in found if (p.cluster, crc.s_out // p.nb, p.buffers) == (cluster, splits, buffers))
    monkeypatch.setattr(inference_plan, "inference", lambda *_: chosen)
    norms = [EvalNorm(n.weight, n.bias, n.running_mean, n.running_var, n.eps) for n in (crc.norm, last)]
    with torch.no_grad():
        out = inference.run(rows, crc.weight_x, crc.weight_h, matrix, *norms, d, pool=pool).permute(0, 3, 1, 2)
        expected = copy.deepcopy(module).double()(x.double(), pool=pool)
    assert out.shape == expected.shape
    assert rms(out, expected) < 1e-2


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_inference(module, emulated, rms, monkeypatch):
    emulated(module[0])  # so that a cluster takes several groups of images
    check_inference(*module, torch.bfloat16, rms, monkeypatch)


@pytest.mark.parametrize("nonlinearity", ["relu", "shared_bn_relu"])
def test_inference_with_other_nonlinearities(nonlinearity, emulated, rms):
    emulated(4)
    module = Recurrent(8, 32, 24, 3, nonlinearity=nonlinearity).eval()
    crc, last = module.crc, module.transition.norm
    for tensor in (crc.bias, None if crc.norm is None else crc.norm.bias):
        if tensor is not None:
            torch.nn.init.normal_(tensor, std=0.3)
    if crc.norm is not None:
        torch.nn.init.uniform_(crc.norm.running_var, 0.5, 2.0)
    x = torch.randn(2, 24, 8, 8).bfloat16()
    own = dispatch._norm_of_steps(crc.step_norm(), crc.bias, 3, crc.weight_x)
    norms = [EvalNorm(n.weight, n.bias, n.mean, n.var, n.eps) for n in (own, norm_of(last))]
    with torch.no_grad():
        rows, matrix = x.permute(0, 2, 3, 1).contiguous(), module.transition.conv.weight.flatten(1)
        out = inference.run(rows, crc.weight_x, crc.weight_h, matrix, *norms, 3).permute(0, 3, 1, 2)
        assert rms(out, copy.deepcopy(module).double()(x.double())) < 1e-2


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("module", MODULES[1::5], ids=str)
def test_inference_in_fp16_and_another_order(module, seed, emulated, rms, monkeypatch):
    emulated(module[0], seed=seed)
    check_inference(*module, torch.float16, rms, monkeypatch)


# ---- the emulator itself --------------------------------------------------------------------------------------------
