"""The fused kernels against the naive loop: on a GPU as they are, elsewhere in Triton's interpreter."""

import copy

import pytest
import torch
from torch import Tensor

from recnets.layers import CRC, Recurrent
from recnets.layers.crc import NONLINEARITIES
from recnets.ops import dispatch, naive
from recnets.ops import torch as plain

pytestmark = pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")
if dispatch.AVAILABLE:
    from recnets.ops.triton import batch_norm, op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bf16 is wrong
# N, H, W, s_in, s_out, d, kernel_x, kernel_h
SMALL = [
    (2, 5, 7, 4, 16, 3, 3, 3),  # nothing fills a tile, two narrow taps short of a product
    (1, 8, 8, 8, 32, 2, 3, 3),  # tiles are whole images
    (3, 5, 4, 12, 48, 3, 3, 1),
    (2, 6, 5, 5, 20, 1, 1, 3),  # one step: W_h is idle
    (1, 3, 9, 16, 24, 2, 1, 1),
    (1, 4, 3, 32, 256, 2, 3, 3),  # the widest
]
LARGE = [
    (2, 32, 32, 8, 32, 10, 3, 3),
    (3, 16, 16, 16, 64, 10, 3, 3),
    (5, 8, 8, 32, 128, 10, 3, 3),
    (2, 8, 8, 24, 96, 30, 3, 3),
    (1, 64, 64, 4, 16, 3, 3, 3),
    (3, 17, 13, 12, 48, 5, 3, 3),
    (2, 16, 16, 16, 64, 4, 1, 3),
]
SHAPES = SMALL + (LARGE if DEVICE == "cuda" else [])


def rms(error: Tensor, reference: Tensor) -> float:
    """RMS(error)/RMS(reference), or the error itself where the reference is zero but for its own rounding."""
    error, reference = error.detach().double(), reference.detach().double()
    size = reference.square().mean().sqrt()
    distance = (error - reference).square().mean().sqrt()
    return float(distance / size) if size > 1e-12 else float(distance)


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """x, W_x, W_h, γ, β on the device, x in `dtype` and the parameters in float32."""
    n, height, width, s_in, s_out, d, kernel_x, kernel_h = shape
    x = torch.randn(n, d * s_in, height, width)
    weight_x = torch.randn(s_out, s_in, kernel_x, kernel_x) / (s_in * kernel_x**2) ** 0.5
    weight_h = torch.randn(s_out, s_out, kernel_h, kernel_h) / (s_out * kernel_h**2) ** 0.5
    gamma, beta = torch.rand(d * s_out) + 0.5, 0.1 * torch.randn(d * s_out)
    gamma[::7] *= -1  # trained networks have some
    return [x.to(DEVICE, dtype), *(t.to(DEVICE) for t in (weight_x, weight_h, gamma, beta))], d


def leaves(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


def gradients(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def reference(
    tensors: list[Tensor], d: int, decisions: Tensor | None = None
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The naive loop in float64: its inputs as leaves, its output, and the running mean and variance after it."""
    exact = leaves(tensors, torch.float64)
    running = [torch.zeros_like(exact[3]).detach(), torch.ones_like(exact[3]).detach()]
    norm = (running[0], running[1], exact[3], exact[4])
    return exact, naive.crc(*exact[:3], None, norm, d=d, training=True, decisions=decisions), running


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_forward_statistics_and_every_gradient(shape, deterministic, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.use_deterministic_algorithms(deterministic)
    tensors, d = make(shape, torch.float32)
    actual = leaves(tensors)
    fused, _, sums = op.crc(*actual, None, d, 1e-5, True)
    assert rms(fused, reference(tensors, d)[1]) < 1e-5

    expected, h, running = reference(tensors, d, (fused > 0).double())
    grad = torch.randn_like(h)
    h.backward(grad)
    fused.backward(grad.float())
    for name, got, want in zip(
        ("x", "weight_x", "weight_h", "gamma", "beta"), gradients(actual), gradients(expected), strict=True
    ):
        assert rms(got, want) < 1e-5, name
    mean, var = (torch.full_like(t, value).float() for t, value in zip(running, (0.0, 1.0), strict=True))
    op.update_running(sums, mean, var, h.shape[0] * h.shape[2] * h.shape[3], 0.1)
    assert rms(mean, running[0]) < 1e-5
    assert rms(var, running[1]) < 1e-5


def check_layer(shape: tuple[int, ...], dtype: torch.dtype, bound: float, *, frozen: bool = False, **options) -> None:
    """A CRC layer by the kernels against the naive loop: output, running statistics and every gradient."""
    n, height, width, s_in, s_out, d, kernel_x, kernel_h = shape
    layer = CRC(s_in, s_out, d, kernel_x=kernel_x, kernel_h=kernel_h, backend="triton", **options).to(DEVICE)
    if layer.norm is not None:
        torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(layer.norm.running_mean, std=0.3)
        torch.nn.init.uniform_(layer.norm.running_var, 0.5, 2.0)
    for bias in (layer.bias, None if layer.norm is None else layer.norm.bias):
        if bias is not None:
            torch.nn.init.normal_(bias, std=0.3)
    layer.train(not frozen)
    x = torch.randn(n, d * s_in, height, width, device=DEVICE).to(dtype).requires_grad_()
    state = layer.state_dict()
    exact = {name: t.double().clone() for name, t in state.items() if t.is_floating_point()}
    parameters = {name: exact[name].requires_grad_() for name, _ in layer.named_parameters()}
    running = tuple(exact.get(f"norm.{name}") for name in ("running_mean", "running_var", "weight", "bias"))
    out = layer(x)
    wanted_x = x.detach().double().requires_grad_()
    wanted = naive.crc(
        wanted_x, exact["weight_x"], exact["weight_h"], exact.get("bias"), None if running[0] is None else running,
        d=d, nonlinearity=layer.nonlinearity, training=not frozen, decisions=(out > 0).double(),
    )  # fmt: skip
    grad = torch.randn_like(wanted).to(dtype)
    out.backward(grad)
    wanted.backward(grad.double())
    assert rms(out, wanted) < bound
    assert rms(x.grad, wanted_x.grad) < bound
    for name, parameter in layer.named_parameters():
        (want,) = gradients([parameters[name]])
        assert parameter.grad is not None, name
        # The norm after a linear recursion takes the bias out again, but for the border: sums that nearly cancel, and
        # of what is left rounding is up to 5 % in bf16.
        cancels = layer.nonlinearity == "linear" and name == "bias"
        assert rms(parameter.grad, want) < (10 * bound if cancels else bound), name
    for name, t in layer.named_buffers():
        if t.is_floating_point():
            assert rms(t, exact[name]) < bound, name


@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("shape", SMALL[:4] + (LARGE if DEVICE == "cuda" else []), ids=str)
def test_every_nonlinearity_in_training_and_with_a_frozen_norm(shape, nonlinearity, frozen, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    check_layer(shape, torch.float32, 1e-5, nonlinearity=nonlinearity, frozen=frozen)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_every_nonlinearity_in_half_precision(nonlinearity):
    for shape in LARGE if DEVICE == "cuda" else SMALL[:2]:
        check_layer(shape, HALF, 1e-2, nonlinearity=nonlinearity)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_every_nonlinearity_where_order_is_free(nonlinearity, frozen):
    """By the CUDA kernels where they can run: the tests above ask for determinism, which Triton's have alone."""
    for shape in LARGE[5:]:
        check_layer(shape, HALF, 1e-2, nonlinearity=nonlinearity, frozen=frozen)


@pytest.mark.parametrize("shape", SMALL[:3] + (LARGE if DEVICE == "cuda" else []), ids=str)
def test_half_precision_forward_and_every_gradient(shape):
    tensors, d = make(shape, HALF)
    actual = leaves(tensors)
    fused, _, _ = op.crc(*actual, None, d, 1e-5, True)
    assert rms(fused, reference(tensors, d)[1]) < 1e-2

    expected, h, _ = reference(tensors, d, (fused > 0).double())
    grad = torch.randn_like(h)
    h.backward(grad)
    fused.backward(grad.to(HALF))
    for got, want in zip(gradients(actual), gradients(expected), strict=True):
        assert rms(got, want) < 1e-2


def test_ten_repeats_are_bitwise_equal_where_determinism_is_asked_for():
    torch.use_deterministic_algorithms(True)
    tensors, d = make(LARGE[0] if DEVICE == "cuda" else SMALL[1], HALF)

    def run() -> list[Tensor]:
        inputs = leaves(tensors)
        h, _, sums = op.crc(*inputs, None, d, 1e-5, True)
        h.backward(torch.ones_like(h))
        return [h, sums, *gradients(inputs)]

    first = run()
    for _ in range(9 if DEVICE == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_norm_and_relu_of_a_map():
    y = 2 * torch.randn(3, 20, 5, 7, device=DEVICE) + 1
    gamma, beta = torch.rand(20, device=DEVICE) + 0.5, torch.randn(20, device=DEVICE)
    expected, actual = leaves([y, gamma, beta], torch.float64), leaves([y, gamma, beta])
    out = torch.relu(torch.nn.functional.batch_norm(expected[0], None, None, expected[1], expected[2], True))
    grad = torch.randn_like(out)
    out.backward(grad)
    fused, _ = batch_norm.norm_relu_train(*actual, 1e-5, 1)
    fused.backward(grad.float())
    assert rms(fused, out) < 1e-5
    for got, want in zip(gradients(actual), gradients(expected), strict=True):
        assert rms(got, want) < 1e-5


@pytest.mark.parametrize("pool", [False, True])
def test_norm_of_segments(pool):
    y, gamma, beta = (
        torch.randn(3, 20, 6, 8, device=DEVICE),
        torch.rand(20, device=DEVICE),
        torch.randn(20, device=DEVICE),
    )
    operator = batch_norm.norm_relu_pool_train if pool else batch_norm.norm_relu_train
    whole, parts = leaves([y, gamma, beta]), leaves([y, gamma, beta])
    out, got = operator(*whole, 1e-5, 1)[0], operator(*parts, 1e-5, 5)[0]
    assert got.shape == (15, 4, *out.shape[2:])
    assert torch.equal(plain.together(got, 5), out)
    grad = torch.randn_like(out)
    out.backward(grad)
    got.backward(plain.apart(grad, 5))
    for one, other in zip(gradients(parts), gradients(whole), strict=True):
        assert rms(one, other) < 1e-5
    torch.library.opcheck(operator, (*parts, 1e-5, 5), test_utils=("test_schema", "test_faketensor"))


def test_segments_apart():
    tensors, d = make((2, 5, 4, 4, 16, 3, 3, 3), torch.float32)
    whole, parts = leaves(tensors), leaves([plain.apart(tensors[0], d), *tensors[1:]])
    h, got = op.crc(*whole, None, d, 1e-5, True)[0], op.crc(*parts, None, d, 1e-5, True)[0]
    assert rms(got, h) < 1e-5
    grad = torch.randn_like(h)
    h.backward(grad)
    got.backward(grad)
    expected = gradients(whole)
    expected[0] = plain.apart(expected[0], d)
    for one, other in zip(gradients(parts), expected, strict=True):
        assert rms(one, other) < 1e-5
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.crc, (*parts, None, d, 1e-5, True), test_utils=checks)


def test_operators_are_registered_as_torch_expects():
    tensors, d = make((1, 3, 4, 4, 16, 2, 3, 3), torch.float32)
    # Batch statistics are added atomically by default: two runs agree in all but the last digits.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.crc, (*leaves(tensors), None, d, 1e-5, True), test_utils=checks)
    statistics = (torch.zeros(2 * 16, device=DEVICE), torch.ones(2 * 16, device=DEVICE))
    known = torch.stack(statistics).view(2, 2, 16)
    torch.library.opcheck(op.crc, (*leaves(tensors), known, d, 1e-5, False), test_utils=checks)
    y = torch.randn(2, 16, 3, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(batch_norm.norm_relu_train, (y, *statistics, 1e-5, 1), test_utils=checks)


def with_backend(module: torch.nn.Module, backend: str) -> torch.nn.Module:
    module = copy.deepcopy(module)
    for child in module.modules():
        if hasattr(child, "backend"):
            child.backend = backend
    return module


def test_a_recurrent_module_gives_the_same_on_both_backends(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain = Recurrent(4, 16, 12, 2, backend="torch").to(DEVICE)
    fused = with_backend(plain, "triton")
    x = torch.randn(2, 8, 4, 6, device=DEVICE)
    for training in (True, True, False):
        with torch.set_grad_enabled(training):
            a, b = plain.train(training)(x), fused.train(training)(x)
        assert rms(b, a) < 1e-4
        if training:
            a.square().sum().backward()
            b.square().sum().backward()
    for (name, got), want in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert rms(got.grad, want.grad) < 1e-4, name
    for (name, got), want in zip(fused.named_buffers(), plain.buffers(), strict=True):
        assert rms(got.float(), want.float()) < 1e-4, name


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_a_compiler_takes_the_kernels_whole(nonlinearity):
    torch._dynamo.reset()
    module = Recurrent(4, 16, 12, 2, nonlinearity=nonlinearity, backend="triton").to(DEVICE)
    traced = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, 6, 5, device=DEVICE)
    for training in (True, False):
        expected, actual = module.train(training)(x), traced.train(training)(x)
        assert rms(actual, expected) < 1e-5
        expected.square().sum().backward()
        actual.square().sum().backward()
    for (name, got), want in zip(traced.named_parameters(), module.parameters(), strict=True):
        assert rms(got.grad, want.grad) < 1e-4, name
    for (name, got), want in zip(traced.named_buffers(), module.buffers(), strict=True):
        assert rms(got, want) < 1e-5, name


def test_a_compiler_takes_them_unasked(monkeypatch):
    """PyTorch 2.11 says in torch.compile that it exports, and what is exported gets no kernels from "auto"."""
    torch._dynamo.reset()
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "cannot_run", lambda *_: None)
    graphs: list[str] = []
    layer = CRC(4, 16, 2, backend="auto").to(DEVICE)
    traced = torch.compile(layer, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph, fullgraph=True)
    traced(torch.randn(1, 8, 4, 4, device=DEVICE))
    assert "recnets.crc" in graphs[0]


@pytest.mark.parametrize("nonlinearity", ["relu", "separate_bn_relu"])
def test_what_looks_at_operators_one_by_one_does_not_get_kernels(nonlinearity, monkeypatch):
    layer = CRC(4, 16, 2, nonlinearity=nonlinearity, backend="triton").to(DEVICE).eval()
    x = torch.randn(1, 8, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(layer, (x,), (x,))
    with pytest.raises(ValueError, match=r"transformations of torch\.func"):
        torch.func.grad(lambda t: layer(t).sum())(x)
    # "auto" runs in plain PyTorch there. Without a GPU it does so anyway, unless it is told that this is none.
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "cannot_run", lambda *_: None)
    layer.backend = "auto"
    tangent = torch.func.jvp(layer, (x,), (x,))[1]
    assert tangent.abs().sum() > 0
    assert torch.func.grad(lambda t: layer(t).sum())(x).abs().sum() > 0
    graph = str(torch.export.export(layer, (x,)).graph)
    assert "conv" in graph
    assert "recnets" not in graph
    assert "recnets::" not in str(torch.jit.trace(layer, x, check_trace=False).graph)


def test_operators_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device: of a network on the second GPU, that may be the first."""
    guard, guarded = torch.cuda.device_of, []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: guarded.append(tensor) or guard(tensor))
    module = Recurrent(4, 16, 12, 2, backend="triton").to(DEVICE)
    module(torch.randn(2, 8, 4, 6, device=DEVICE), pool=True).sum().backward()
    # The layer, the norm, what both leave in running statistics, and the two backwards.
    assert len(guarded) == 6
    assert {tensor.device.type for tensor in guarded} == {DEVICE}


def test_an_explicit_request_that_cannot_be_met_raises():
    layer = CRC(4, 16, 2, backend="triton").to(DEVICE)
    with pytest.raises(ValueError, match="float64"):
        layer.double()(torch.randn(1, 8, 4, 4, device=DEVICE, dtype=torch.float64))
    with pytest.raises(ValueError, match="up to 256 channels"):
        CRC(4, 257, 2, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_under_autocast_compile_and_a_cuda_graph():
    module = Recurrent(8, 32, 40, 5, backend="triton").cuda()
    x = torch.randn(4, 40, 16, 16, device="cuda")
    plain = with_backend(module, "torch")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected, actual = plain(x), module(x)
        compiled = torch.compile(module, fullgraph=True)(x)
    assert actual.dtype == torch.bfloat16
    assert rms(actual, expected) < 2e-2
    assert rms(compiled, expected) < 2e-2
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = module(x)
        graph.replay()
        torch.cuda.synchronize()
    assert rms(captured, module(x)) < 1e-4
