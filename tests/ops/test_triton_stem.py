"""The stem's convolution by gathered neighbourhoods: on a GPU as it is, elsewhere in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets import create_model
from recnets.ops import dispatch
from recnets.ops.norm import Norm

pytestmark = pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")
if dispatch.AVAILABLE:
    from recnets.ops.triton.stem import WIDTH, neighbours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bf16 is wrong
SHAPES = [(2, 3, 6, 8), (3, 1, 5, 7), (1, 2, 9, 4), (1, 3, 1, 1)]


def unfolded(x: Tensor) -> Tensor:
    """(N, H, W, 9·C), taps before channels."""
    n, channels, height, width = x.shape
    columns = F.unfold(x, 3, padding=1).view(n, channels, 9, height, width)
    return columns.permute(0, 3, 4, 2, 1).reshape(n, height, width, 9 * channels)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbours_are_those_of_unfold(shape, memory_format):
    x = torch.randn(shape, device=DEVICE).contiguous(memory_format=memory_format)
    out = neighbours(x, torch.float32)
    assert out.shape == (shape[0], *shape[2:], WIDTH)
    assert torch.equal(out[..., : 9 * shape[1]], unfolded(x))
    assert not out[..., 9 * shape[1] :].any()


def test_operator_is_registered_as_torch_expects():
    x = torch.randn(2, 3, 5, 4, device=DEVICE)
    torch.library.opcheck(neighbours, (x, HALF), test_utils=("test_schema", "test_faketensor"))


def parameters(channels: int, bias: bool) -> list[Tensor]:
    weight = torch.randn(20, channels, 3, 3) / (9 * channels) ** 0.5
    norm = [0.2 * torch.randn(20), torch.rand(20) + 0.5, torch.rand(20) + 0.5, torch.randn(20)]
    return [t.to(DEVICE) for t in ([weight, torch.randn(20)] if bias else [weight]) + norm]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_stem_is_convolution_norm_and_relu(shape, training, bias):
    x = torch.randn(shape, device=DEVICE).to(HALF)
    weight, *rest = parameters(shape[1], bias)
    add = rest.pop(0).to(HALF) if bias else None
    weight = weight.to(HALF).requires_grad_(training)
    mean, var, gamma, beta = rest
    twin = [t.double() for t in rest]
    exact = weight.detach().double().requires_grad_(training)
    with torch.set_grad_enabled(training):
        out = dispatch.stem(x, weight, add, Norm(mean, var, gamma, beta, training, 0.1, 1e-5), backend="triton")
        pre = F.conv2d(x.double(), exact, None if add is None else add.double(), padding=1)
        expected = torch.relu(F.batch_norm(pre, *twin, training, 0.1, 1e-5))
    assert (out.double() - expected).square().mean().sqrt() < 1e-2 * expected.square().mean().sqrt()
    torch.testing.assert_close([mean, var], [t.float() for t in twin[:2]], rtol=1e-2, atol=1e-2)
    if training:
        grad = torch.randn_like(expected)
        out.backward(grad.to(HALF))
        expected.backward(grad)
        assert weight.grad is not None
        assert exact.grad is not None
        assert (weight.grad.double() - exact.grad).square().mean().sqrt() < 2e-2 * exact.grad.square().mean().sqrt()


def test_the_gradient_of_a_picture_takes_the_convolution():
    x = torch.randn(1, 3, 4, 4, device=DEVICE, dtype=HALF, requires_grad=True)
    weight, *norm = parameters(3, False)
    out = dispatch.stem(x, weight.to(HALF), None, Norm(*norm, True, 0.1, 1e-5), backend="triton")
    out.sum().backward()
    assert x.grad is not None


def test_a_hook_on_the_convolution_is_called():
    model = create_model("recnet_60_480")
    seen: list[nn.Module] = []
    model.stem.conv.register_forward_hook(lambda module, *_: seen.append(module))
    model.eval()(torch.randn(1, 3, 8, 8))
    assert seen == [model.stem.conv]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 80, 7, stride=2, padding=3, bias=False),
        nn.Conv2d(3, 80, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 80, 1),
        nn.Conv2d(3, 80, 3, padding=2, dilation=2),
    ],
    ids=str,
)
def test_another_convolution_is_called_as_it_is(conv):
    stem = create_model("recnet_60_1280").stem.eval()
    stem.conv = conv
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(stem(x), torch.relu(stem.norm(conv(x))))


def test_tangents_take_the_convolution():
    weight, *norm = parameters(3, False)
    x, tangent = torch.randn(2, 1, 3, 4, 4, device=DEVICE, dtype=HALF).unbind(0)

    def run(x: Tensor) -> Tensor:
        return dispatch.stem(x, weight.to(HALF), None, Norm(*norm, False, 0.1, 1e-5), backend="triton")

    with torch.no_grad():
        _, derivative = torch.func.jvp(run, (x,), (tangent,))
    assert derivative.any()


def test_what_is_traced_has_no_operator_of_ours():
    weight, *norm = parameters(3, False)
    x = torch.randn(1, 3, 4, 4, device=DEVICE, dtype=HALF)

    def run(x: Tensor) -> Tensor:
        return dispatch.stem(x, weight.to(HALF), None, Norm(*norm, False, 0.1, 1e-5), backend="triton")

    with torch.no_grad():
        traced = torch.jit.trace(run, (x,), check_trace=False)
    assert "recnets::" not in str(traced.graph)
