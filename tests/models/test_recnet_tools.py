"""RecNets under PyTorch's own tools: compile, export, half precision, channels-last."""

import copy
import shutil

import pytest
import torch
from torch.export import Dim, export

from recnets import RecNet
from recnets.layers import NONLINEARITIES, Recurrent


def tiny(**options):
    return RecNet(**{"e": 2, "s": (2, 3), "d": (3, 2), "num_classes": 4, **options})


def check_compiled(model, x, backend, tolerance):
    """Training (output, gradients, statistics), evaluation with gradients and without, each without a graph break."""
    torch._dynamo.reset()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    close = {"rtol": tolerance, "atol": tolerance}
    out, expected = compiled(x), reference(x)
    torch.testing.assert_close(out, expected, **close)
    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, **close, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for (name, own), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, other, **close, msg=lambda m, name=name: f"{name}: {m}")
    model.eval()
    reference.eval()
    torch.testing.assert_close(compiled(x), reference(x), **close)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), reference(x), **close)


@pytest.mark.parametrize("options", [*({"nonlinearity": n} for n in NONLINEARITIES), {"recurrent": False}], ids=str)
def test_compile_module(options):
    """Auto mode: concat while training, stream without gradients."""
    module = Recurrent(2, 3, 4, 2, **options).double()
    check_compiled(module, torch.randn(2, 4, 4, 3, dtype=torch.float64), "aot_eager", 1e-9)


@pytest.mark.slow
def test_compile_network():
    check_compiled(
        tiny(s=(2,), d=(2,), head="hidden").double(), torch.randn(3, 3, 6, 4, dtype=torch.float64), "aot_eager", 1e-9
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compile_with_inductor():
    """Generated code for the streamed module, which is what inference runs."""
    torch._dynamo.reset()
    module, x = Recurrent(2, 3, 4, 2).eval(), torch.randn(2, 4, 4, 3)
    compiled = torch.compile(module, fullgraph=True, backend="inductor")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [True, False], ids=["concat", "stream"])
def test_export_with_a_dynamic_batch(grad):
    model = tiny().eval()
    x = torch.randn(3, 3, 6, 4)
    with torch.set_grad_enabled(grad):
        program = export(model, (x,), dynamic_shapes={"x": {0: Dim("batch")}})
    for n in (1, 3, 7):
        x = torch.randn(n, 3, 6, 4)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)
    wide = [
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].dim() == 4
        and node.meta["val"].shape[1] == 12
    ]
    assert bool(wide) == grad  # d·s_out = 12 channels exist only where the states are concatenated


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="PyTorch 2.11 exports pooled sides as even or as odd, not as both"
)
def test_export_with_dynamic_sides():
    model = tiny().eval()
    shapes = {"x": {0: Dim("batch"), 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)}}
    program = export(model, (torch.randn(3, 3, 9, 8),), dynamic_shapes=shapes)
    for size in ((1, 3, 8, 9), (2, 3, 4, 17)):
        x = torch.randn(size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [*({"nonlinearity": n} for n in NONLINEARITIES), {"recurrent": False}], ids=str)
def test_trace(options, grad):
    """A trace is checked without gradients, whether it is made with them or not: both must be one graph."""
    model = tiny(**options).eval()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, torch.randn(1, 3, 6, 4))
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(traced(x), model(x), rtol=1e-5, atol=1e-5)


def test_pictures_of_another_type_than_the_weights():
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=r"torch.float32 .* got torch.float64"):
            tiny()(torch.zeros(1, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", ["linear", "hidden"])
def test_half_precision(dtype, head):
    model, x = tiny(head=head).eval(), torch.randn(2, 3, 6, 4)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expected = model(x)
            under_autocast = [autocast(model, pictures, dtype) for pictures in (x, x.to(dtype))]
            for out in (copy.deepcopy(model).to(dtype)(x.to(dtype)), *under_autocast):
                assert out.dtype == dtype
                torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.05)


def autocast(model, x, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return model(x)


def test_trains_under_autocast():
    model, x = tiny(), torch.randn(4, 3, 6, 4)
    autocast(model, x, torch.bfloat16).float().square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


def test_channels_last():
    model, x = tiny().eval(), torch.randn(2, 3, 6, 4)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = other(x.to(memory_format=torch.channels_last))
            torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-5)


def test_inference_mode():
    model, x = tiny().eval(), torch.randn(2, 3, 6, 4)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), model(x.clone()), rtol=0, atol=0)


def test_meta_device():
    with torch.device("meta"):
        model = tiny()
        assert model(torch.empty(2, 3, 8, 8)).shape == (2, 4)


def test_pickle(tmp_path):
    model, x = tiny().eval(), torch.randn(2, 3, 6, 4)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(x), model(x))


def test_gradient_checkpointing():
    """Recomputation in the backward pass gives the same gradients (statistics move twice, as with any BN)."""
    module, x = Recurrent(2, 3, 4, 3).double().eval(), torch.randn(2, 6, 4, 4, dtype=torch.float64)
    plain = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), list(module.parameters())), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
