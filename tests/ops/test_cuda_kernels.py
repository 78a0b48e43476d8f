"""The CUDA kernels: their plans anywhere, their results against the naive loop on a GPU."""

import pytest
import torch

from recnets import create_model, list_models
from recnets.layers import Recurrent
from recnets.ops import naive
from recnets.ops import torch as plain
from recnets.ops.cuda import crc, grad_plan, nvrtc, plan, tuned
from recnets.ops.cuda.plan import Layer

MULTIPROCESSORS = 132
# N, H, W, s_in, s_out, d, kernel_x, kernel_h
SHAPES = [
    (3, 32, 32, 8, 32, 4, 3, 3),  # rows of an image a block
    (3, 16, 16, 16, 64, 4, 3, 3),
    (3, 8, 8, 32, 128, 4, 3, 3),  # a whole image, two blocks share its channels
    (2, 8, 8, 24, 96, 30, 3, 3),
    (2, 16, 16, 4, 16, 3, 3, 3),  # segments narrower than a copy
    (5, 9, 13, 12, 48, 3, 1, 3),  # nothing is a power of two, and dx in a launch of its own
    (2, 12, 10, 8, 32, 3, 3, 1),
    (1, 64, 64, 4, 16, 3, 3, 3),
    (2, 8, 8, 8, 32, 1, 3, 3),  # one step: W_h is idle
    (200, 32, 32, 8, 32, 4, 3, 3),  # more tiles than blocks, the next one fetched ahead
    (300, 8, 8, 32, 128, 4, 3, 3),
    (150, 16, 16, 24, 96, 3, 3, 3),  # more tiles than blocks, and no registers to fetch ahead in the backward pass
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layers(name: str, n: int) -> list[Layer]:
    """The CRC layers of a model on a batch of n pictures of 32×32."""
    modules = [m for m in create_model(name).modules() if isinstance(m, Recurrent)]
    sizes = [32, 32, 16, 16, 8, 8]
    return [
        Layer(n, size, size, m.crc.d, m.crc.s_in, m.crc.s_out, 3, 3) for m, size in zip(modules, sizes, strict=True)
    ]


@pytest.mark.parametrize("n", [1, 16, 64, 1024])
@pytest.mark.parametrize("name", [name for name in list_models("recnet_*") if "." not in name])
def test_every_named_model_has_plans_that_fit(name, n):
    for layer in layers(name, n):
        for kind in ("forward", "backward"):
            found = plan.step(kind, layer, MULTIPROCESSORS)
            assert found is not None
            assert found.shared <= plan.SHARED
            assert found.resident * (found.shared + 1024) <= 228 * 1024
            assert found.wm * found.mt * 16 >= found.tile.pixels(layer)
            assert found.wn * found.nt * 8 == found.nb
            assert found.nt % 2 == 0
            assert layer.so % found.nb == 0
            if found.single:  # all blocks wait for each other, so all must be there at once
                blocks = found.tile.count(layer) * (layer.so // found.nb)
                assert blocks <= found.resident * MULTIPROCESSORS
        grad = grad_plan.weight_grad(layer, layer.so, 3, True) or grad_plan.weight_grad(layer, layer.so, 3, False)
        assert grad is not None
        assert grad.shared <= plan.SHARED
        assert grad.blocks[0] * grad.ci == layer.so
        assert grad.blocks[1] * grad.co == layer.so
        assert plan.input_grad(layer, MULTIPROCESSORS) is not None


def test_the_main_model_keeps_one_tile_a_block_and_takes_dx_along(monkeypatch):
    monkeypatch.setattr(tuned, "choice", lambda *_: None)  # what is worked out, whatever was measured since
    for layer in layers("recnet_60_1280", 64):
        backward = plan.step.__wrapped__("backward", layer, MULTIPROCESSORS)
        assert backward is not None
        assert backward.single
        assert backward.dx_tiles > 0
        assert grad_plan.weight_grad.__wrapped__(layer, layer.so, 3, True) is not None


def test_shapes_take_every_way_through_the_kernels():
    found = set()
    for n, h, w, s_in, s_out, d, kernel_x, kernel_h in SHAPES:
        for kind in ("forward", "backward"):
            chosen = plan.step(kind, Layer(n, h, w, d, s_in, s_out, kernel_x, kernel_h), MULTIPROCESSORS)
            assert chosen is not None
            found.add((kind, chosen.single, chosen.prefetch))
    assert found >= {(kind, *way) for kind in ("forward", "backward") for way in ((True, False), (False, True))}
    assert ("backward", False, False) in found


@pytest.mark.parametrize("shape", [(2, 8, 8, 5, 20, 2, 3, 3), (2, 8, 8, 8, 112, 2, 3, 3), (2, 8, 8, 8, 32, 2, 5, 3)])
def test_there_is_no_plan_where_there_is_no_kernel(shape):
    n, h, w, s_in, s_out, d, kernel_x, kernel_h = shape
    assert plan.step("forward", Layer(n, h, w, d, s_in, s_out, kernel_x, kernel_h), MULTIPROCESSORS) is None


@pytest.mark.parametrize("channels", [4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_eight_pixels_lie_in_different_banks(channels):
    pitch = plan.pitch(channels)
    assert pitch >= 2 * channels
    assert len({pixel * pitch % 128 // 16 for pixel in range(8)}) == 8


def test_a_tensor_on_the_cpu_is_not_for_these_kernels():
    x = torch.zeros(1, 8, 8, 16, dtype=torch.bfloat16)
    assert not crc.supports(x, Layer(1, 8, 8, 2, 8, 32, 3, 3))


class FakeNvrtc:
    """Answers only for its version."""

    def nvrtcVersion(self, major, minor) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0


def test_what_spills_is_told_as_the_driver_does(monkeypatch):
    """The bytes a thread keeps in memory: what benchmarks/plans.py takes for a few, the tests do too."""
    log = "40 bytes stack frame, 36 bytes spill stores, 72 bytes spill loads\nUsed 168 registers, 1 barrier"
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: (b"", log))
    assert nvrtc.resources(("half.cuh",), ()) == (168, 40)


def test_binaries_are_kept_between_processes(tmp_path, monkeypatch):
    compiled: list[str] = []
    monkeypatch.setenv("RECNETS_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", FakeNvrtc)
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, arch, defines: compiled.append(source) or b"cubin")
    assert nvrtc._kept("code", "sm_90", ["-DH=8"]) == b"cubin"
    assert nvrtc._kept("code", "sm_90", ["-DH=8"]) == b"cubin"
    assert compiled == ["code"]
    nvrtc._kept("code", "sm_90", ["-DH=16"])
    nvrtc._kept("code", "sm_100", ["-DH=8"])
    assert len(compiled) == 3
    assert len(list((tmp_path / "kernels").glob("*.cubin"))) == 3


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "kernels").write_text("a file where the folder should be")
    monkeypatch.setenv("RECNETS_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", FakeNvrtc)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"cubin")
    assert nvrtc._kept("code", "sm_90", []) == b"cubin"


def test_a_missing_compiler_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(OSError, match=r"libnvrtc\.so\.99"):
        nvrtc._nvrtc.__wrapped__()


def poison(device: str) -> None:
    """Leave NaN in the memory that the next tensors will get; on the CPU they are full of it anyway."""
    held = [torch.full((2**power,), torch.nan, device=device) for power in range(8, 27) if device == "cuda"]
    del held


def check_forward_and_every_gradient(shape, dtype, rms, device="cuda", *, batch=True, relu=True, apart=False) -> None:
    """Against the naive loop; without `batch` the statistics are known, without `relu` the recursion is linear.

    `apart`: x and its gradient are a map for every step.
    """
    n, h, w, s_in, s_out, d, kernel_x, kernel_h = shape
    x = torch.randn(n, h, w, d * s_in, device=device).to(dtype)
    weight_x = (torch.randn(s_out, s_in, kernel_x, kernel_x, device=device) / (s_in * kernel_x**2) ** 0.5).to(dtype)
    weight_h = (torch.randn(s_out, s_out, kernel_h, kernel_h, device=device) / (s_out * kernel_h**2) ** 0.5).to(dtype)
    gamma, beta = torch.rand(d * s_out, device=device) + 0.5, 0.1 * torch.randn(d * s_out, device=device)
    gamma[::7] *= -1  # trained networks have some
    mean, var = 0.1 * torch.randn(d * s_out, device=device), torch.rand(d * s_out, device=device) + 0.5
    statistics = None if batch else torch.stack([mean, var]).view(2, d, s_out)
    inputs = (x, weight_x.float(), weight_h.float(), gamma, beta)
    rows = plain.apart(x.permute(0, 3, 1, 2), d).permute(0, 2, 3, 1) if apart else x
    layer = crc.layer_of(rows, weight_x, weight_h, d)
    assert layer.apart == apart
    assert layer.n == n
    assert crc.supports(rows, layer)
    poison(device)
    hidden, z, sums = crc.forward(rows, *inputs[1:], statistics, layer=layer, eps=1e-5, relu=relu)
    exact = [t.double().requires_grad_() for t in inputs]
    decisions = (hidden > 0).double() if relu else torch.ones_like(hidden, dtype=torch.float64)
    expected = naive.crc(
        exact[0].permute(0, 3, 1, 2), exact[1], exact[2], None, (mean.double(), var.double(), exact[3], exact[4]),
        d=d, training=batch, decisions=decisions.permute(0, 3, 1, 2),
    ).permute(0, 2, 3, 1)  # fmt: skip
    grad = torch.randn_like(expected).to(dtype).contiguous()
    expected.backward(grad.double())
    poison(device)
    dx, dwx, dwh, dnorm = crc.backward(
        grad, rows, hidden, z, sums, *inputs[1:], layer=layer, eps=1e-5, batch=batch, relu=relu
    )
    assert dx.shape == rows.shape
    dx = plain.together(dx.permute(0, 3, 1, 2), d).permute(0, 2, 3, 1) if apart else dx
    assert rms(hidden, expected) < 1e-2
    got = (dx, dwx, dwh, dnorm[1].flatten(), dnorm[0].flatten())
    for name, a, e in zip(("x", "weight_x", "weight_h", "gamma", "beta"), got, exact, strict=True):
        want = torch.zeros_like(e) if e.grad is None else e.grad
        # Sums over 200,000 pixels of random gradients cancel: what is left is small against their rounding.
        assert rms(a, want) < (2e-2 if n > 100 else 1e-2), name


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_every_gradient(shape, dtype, rms):
    check_forward_and_every_gradient(shape, dtype, rms)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "relu"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 5, 8, 9, 11)], ids=str)
def test_known_statistics_and_linear_recursion(shape, batch, relu, rms):
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, batch=batch, relu=relu)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[5] > 1], ids=str)
def test_segments_apart(shape, rms):
    check_forward_and_every_gradient(shape, torch.bfloat16, rms, apart=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("count", [28, 32, 44])
@pytest.mark.parametrize("layer", layers("recnet_90_960", 16)[::2] + layers("recnet_90_960", 64)[::2], ids=str)
def test_plans_for_a_share_of_the_device(layer, count, rms, monkeypatch):
    """As in runs side by side, each with some of the multiprocessors."""
    monkeypatch.setattr(crc, "multiprocessors", lambda index: count)
    shape = (layer.n, layer.h, layer.w, layer.si, layer.so, layer.d, layer.kx, layer.kh)
    check_forward_and_every_gradient(shape, torch.bfloat16, rms)


def test_a_device_too_small_for_the_blocks_of_one_tile(emulated, rms):
    emulated(1)
    with pytest.raises(RuntimeError, match="forward needs 2 blocks at once for Layer"):
        check_forward_and_every_gradient((2, 8, 8, 32, 128, 2, 3, 3), torch.bfloat16, rms, "cpu")
