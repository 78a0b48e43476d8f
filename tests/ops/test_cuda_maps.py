"""BN + ReLU (+ pooling) of a whole map by the CUDA kernels: plans anywhere, results on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from recnets.ops import dispatch
from recnets.ops import torch as plain
from recnets.ops.cuda import norm_relu, plan

if dispatch.AVAILABLE:
    from recnets.ops.triton import batch_norm

# N, H, W, C
SHAPES = [(3, 6, 8, 40), (64, 32, 32, 80), (5, 7, 9, 120), (2, 8, 8, 720), (700, 32, 32, 80), (500, 32, 32, 160)]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_the_map_and_fit(shape, pool, backward):
    n, h, w, channels = shape
    units = n * (h // 2) * (w // 2) if pool else n * h * w
    found = norm_relu.map_plan(units, channels, pool, backward, 132)
    assert (found.blocks - 1) * found.each < units <= found.blocks * found.each
    assert found.shared <= plan.SHARED
    assert found.blocks <= (132 if found.keep else 264)  # all wait for each other, so all must be there at once


def test_a_map_on_the_cpu_is_not_for_these_kernels():
    assert not norm_relu.supports(torch.zeros(1, 4, 4, 8, dtype=torch.bfloat16), False)


def check_output_and_every_gradient(shape, pool, dtype, rms, device="cuda", segments=1) -> None:
    _, h, w, channels = shape
    y = (2 * torch.randn(shape, device=device) + 1).to(dtype)
    gamma, beta = torch.randn(channels, device=device), torch.randn(channels, device=device)
    if pool and (h % 2 or w % 2):
        assert not norm_relu.supports(y, pool, segments)
        return
    assert norm_relu.supports(y, pool, segments)
    assert not norm_relu.supports(y, pool, channels // 4)  # of four channels each
    exact = [t.double().requires_grad_() for t in (y, gamma, beta)]
    expected = torch.relu(F.batch_norm(exact[0].permute(0, 3, 1, 2), None, None, *exact[1:], True))
    expected = (F.max_pool2d(expected, 2) if pool else expected).permute(0, 2, 3, 1)
    grad = torch.randn_like(expected).to(dtype).contiguous()
    expected.backward(grad.double())
    out, sums = norm_relu.forward(y, gamma, beta, 1e-5, pool, segments)
    grad = plain.apart(grad.permute(0, 3, 1, 2), segments).permute(0, 2, 3, 1).contiguous()
    assert out.shape == grad.shape
    dy, (dbeta, dgamma) = norm_relu.backward(grad, y, sums, gamma, beta, 1e-5, pool, segments)
    out = plain.together(out.permute(0, 3, 1, 2), segments).permute(0, 2, 3, 1)
    assert rms(out, expected.detach()) < 1e-2
    for name, got, leaf in zip(("y", "gamma", "beta"), (dy, dgamma.flatten(), dbeta.flatten()), exact, strict=True):
        assert leaf.grad is not None
        # ReLU's decisions near zero differ with rounding; over hundreds of thousands of pixels their sums cancel.
        assert rms(got, leaf.grad) < 1e-2, name


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_every_gradient(shape, pool, dtype, rms):
    check_output_and_every_gradient(shape, pool, dtype, rms)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("pool", [False, True])
def test_operators_take_them(pool, rms):
    """As `dispatch` calls them, with autograd."""
    y = torch.randn(4, 40, 8, 8, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    gamma, beta = torch.randn(40, device="cuda"), torch.randn(40, device="cuda")
    assert norm_relu.supports(y.permute(0, 2, 3, 1), pool)
    actual, exact = (
        [t.clone().to(d or t.dtype).requires_grad_() for t in (y, gamma, beta)] for d in (None, torch.float64)
    )
    operator = batch_norm.norm_relu_pool_train if pool else batch_norm.norm_relu_train
    torch.library.opcheck(operator, (*actual, 1e-5, 1), test_utils=("test_schema", "test_faketensor"))
    out = operator(*actual, 1e-5, 1)[0]
    expected = torch.relu(F.batch_norm(exact[0], None, None, *exact[1:], True))
    expected = F.max_pool2d(expected, 2) if pool else expected
    grad = torch.randn_like(expected).to(torch.bfloat16)
    out.backward(grad)
    expected.backward(grad.double())
    assert rms(out, expected) < 1e-2
    for got, want in zip(actual, exact, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert rms(got.grad, want.grad) < 1e-2
