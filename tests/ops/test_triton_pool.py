"""BN, ReLU and 2×2 max pooling in one operator, against PyTorch: on a GPU as it is, elsewhere in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recnets.ops import dispatch
from recnets.ops.norm import Norm

pytestmark = pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")
if dispatch.AVAILABLE:
    from recnets.ops.triton.batch_norm import norm_relu_pool_train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bf16 is wrong
# N, C, H, W
SMALL = [(2, 16, 4, 6), (3, 20, 5, 7), (2, 5, 9, 4), (1, 3, 2, 3), (1, 160, 2, 2)]
LARGE = [(5, 160, 32, 32), (3, 320, 16, 16), (7, 48, 33, 17), (1, 1280, 8, 8)]
SHAPES = SMALL + (LARGE if DEVICE == "cuda" else [])


def make(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """y in `dtype`, γ and β in float32; a third of γ is negative, so that minima of y become maxima."""
    y = 2 * torch.randn(shape) + 1
    gamma, beta = torch.rand(shape[1]) + 0.5, 0.5 * torch.randn(shape[1])
    gamma[::3] *= -1
    return [y.to(DEVICE, dtype), gamma.to(DEVICE), beta.to(DEVICE)]


def plain(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.max_pool2d(torch.relu(F.batch_norm(y, None, None, gamma, beta, True)), 2)


def leaves(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


def error(actual: Tensor | None, expected: Tensor | None) -> float:
    """RMS(error)/RMS(reference)."""
    assert actual is not None
    assert expected is not None
    wanted = expected.detach().double()
    return float((actual.detach().double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def check(tensors: list[Tensor], bound: float) -> None:
    """Output and every gradient against float64."""
    actual, exact = leaves(tensors), leaves(tensors, torch.float64)
    out, expected = norm_relu_pool_train(*actual, 1e-5, 1)[0], plain(*exact)
    grad = torch.randn_like(expected)
    out.backward(grad.to(out.dtype))
    expected.backward(grad)
    assert out.shape == expected.shape
    assert error(out, expected) < bound
    for name, got, want in zip(("y", "gamma", "beta"), actual, exact, strict=True):
        assert error(got.grad, want.grad) < bound, name


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32(shape, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    check(make(shape, torch.float32), 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_half_precision(shape):
    check(make(shape, HALF), 1e-2)


def test_of_equal_maxima_the_first_takes_the_gradient():
    y, gamma, beta = make((2, 12, 6, 8), torch.float32)
    check([y.round().clamp(-1, 2), gamma, beta], 1e-5)  # most windows have a maximum more than once


def test_any_order_of_memory():
    y, gamma, beta = make((2, 8, 4, 6), torch.float32)
    out = norm_relu_pool_train(y, gamma, beta, 1e-5, 1)[0]
    assert out.is_contiguous(memory_format=torch.channels_last)
    turned = y.contiguous(memory_format=torch.channels_last)
    assert torch.equal(norm_relu_pool_train(turned, gamma, beta, 1e-5, 1)[0], out)


def test_values_that_are_no_numbers_are_not_hidden():
    y, gamma, beta = make((2, 4, 4, 4), torch.float32)
    y[1, 2, 3, 0] = torch.nan
    out = norm_relu_pool_train(y, gamma, beta, 1e-5, 1)[0]
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3]].isfinite().all()


def test_repeats_are_bitwise_equal_where_determinism_is_asked_for():
    tensors = make(SHAPES[-1] if DEVICE == "cuda" else SMALL[1], HALF)

    def run() -> list[Tensor]:
        inputs = leaves(tensors)
        out, sums = norm_relu_pool_train(*inputs, 1e-5, 1)
        out.backward(torch.ones_like(out))
        return [out, sums, *(t.grad for t in inputs if t.grad is not None)]

    first = run()
    for _ in range(9 if DEVICE == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_operator_is_registered_as_torch_expects():
    y, gamma, beta = leaves(make((2, 16, 5, 4), torch.float32))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(norm_relu_pool_train, (y, gamma, beta, 1e-5, 1), test_utils=checks)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("training", [True, False])
def test_dispatch_gives_the_same_with_every_backend(backend, training):
    y, gamma, beta = make((2, 6, 5, 4), torch.float32)
    running = [torch.zeros(6, device=DEVICE), torch.ones(6, device=DEVICE)]
    ours, theirs = [t.clone() for t in running], [t.clone() for t in running]
    out = dispatch.norm_relu(y.clone(), Norm(*ours, gamma, beta, training, 0.1, 1e-5), backend=backend, pool=True)
    expected = F.max_pool2d(torch.relu(F.batch_norm(y, *theirs, gamma, beta, training, 0.1, 1e-5)), 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours, theirs)


def test_a_map_of_one_row_is_refused_as_by_pytorch():
    y, gamma, beta = make((2, 4, 1, 6), torch.float32)
    with pytest.raises(RuntimeError, match="too small"):
        dispatch.norm_relu(y, Norm(None, None, gamma, beta, True, 0.1, 1e-5), backend="triton", pool=True)
