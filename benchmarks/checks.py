"""Are the kernels right on this device? Against the naive loop and plain PyTorch in float64, before any is timed."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets import CRC, Recurrent, create_model
from recnets.ops import dispatch, naive
from recnets.ops.cuda import crc
from recnets.ops.norm import Norm

# batch, side, s_in, s_out, d
SHAPES = [(3, 32, 8, 32, 10), (3, 16, 16, 64, 10), (3, 8, 32, 128, 10), (2, 8, 24, 96, 30), (1, 64, 4, 16, 3)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def rms(error: Tensor, reference: Tensor) -> float:
    """RMS(error)/RMS(reference); infinite for NaN, which `max` would pass over."""
    found = float((error.double() - reference).square().mean().sqrt() / reference.square().mean().sqrt())
    return math.inf if math.isnan(found) else found


def check_crc(shape: tuple[int, ...], dtype: torch.dtype, nonlinearity: str) -> float:
    """The largest relative error of a layer's output and gradients against the naive loop in float64.

    The naive loop is given the kernels' decisions of ReLU: next to zero they fall either way.
    """
    n, side, s_in, s_out, d = shape
    layer = CRC(s_in, s_out, d, nonlinearity=nonlinearity).cuda()
    if layer.norm is not None:
        nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
        nn.init.normal_(layer.norm.bias, std=0.2)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    actual = [torch.randn(n, d * s_in, side, side, device="cuda", dtype=dtype).requires_grad_(), *parameters]
    out = layer(actual[0])
    exact = [t.detach().double().requires_grad_() for t in actual]
    own = dict(zip(names, exact[1:], strict=True))
    norm = None
    if layer.norm is not None:
        running = (t.double() for t in (layer.norm.running_mean, layer.norm.running_var) if t is not None)
        norm = (*running, own["norm.weight"], own["norm.bias"])
    h = naive.crc(
        exact[0], own["weight_x"], own["weight_h"], own.get("bias"), norm,
        d=d, nonlinearity=nonlinearity, training=True, decisions=(out > 0).double(),
    )  # fmt: skip
    # The norm after a linear recursion takes the bias out again, but for the border: sums that nearly cancel, and of
    # what is left rounding is up to 5 % in bf16.
    allowed = [10.0 if nonlinearity == "linear" and name == "bias" else 1.0 for name in names]
    return _errors(out, h, actual, exact, [1.0, *allowed])


def check_norm(dtype: torch.dtype, pool: bool) -> float:
    """The same for BN and ReLU of a map, with and without pooling."""
    shapes = [(3, 80, 33, 32), (80,), (80,)]
    actual = [torch.randn(s, device="cuda").to(dtype if len(s) > 1 else torch.float32).requires_grad_() for s in shapes]
    out = dispatch.norm_relu(actual[0], Norm(None, None, actual[1], actual[2], True, 0.1, 1e-5), pool=pool)
    exact = [t.detach().double().requires_grad_() for t in actual]
    expected = torch.relu(F.batch_norm(exact[0], None, None, exact[1], exact[2], True))
    return _errors(out, F.max_pool2d(expected, 2) if pool else expected, actual, exact, [1.0] * 3)


def check_inference(shape: tuple[int, ...], dtype: torch.dtype, pool: bool, nonlinearity: str) -> float:
    """The relative error of a Recurrent module's output in evaluation against itself in float64."""
    n, side, s_in, s_out, d = shape
    module = Recurrent(s_in, s_out, 5 * s_out, d, nonlinearity=nonlinearity).cuda().eval()
    x = torch.randn(n, d * s_in, side, side, device="cuda", dtype=dtype)
    with torch.no_grad():
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            out = module(x, pool=pool)
        return rms(out, module.double()(x.double(), pool=pool))


def check_segments(dtype: torch.dtype, nonlinearity: str) -> float:
    """A tenth of the largest relative difference of a network's gradients where segments pass apart and where not.

    Sums are added in any order, so that two runs alike differ too, where ReLU's decisions near zero turn.
    """
    found = []
    for apart in (False, True):
        torch.manual_seed(0)
        network = create_model("RecNet(4, 8, 16, 32, 3, 3, 3)", nonlinearity=nonlinearity).cuda().train()
        images = torch.randn(16, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
        with (
            mock.patch.object(dispatch, "APART", apart),
            mock.patch.object(crc, "layer_of", wraps=crc.layer_of) as asked,
            torch.autocast("cuda", dtype=dtype),
        ):
            loss = F.cross_entropy(network(images), torch.arange(16, device="cuda") % 10)
        if apart and not any(len(call.args[0]) > len(images) for call in asked.call_args_list):
            raise RuntimeError("no layer was given its segments apart")
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in network.parameters() if p.grad is not None)])
    return max(rms(one, other.double()) for one, other in zip(*found, strict=True)) / 10


def _errors(out: Tensor, expected: Tensor, actual: list[Tensor], exact: list[Tensor], allowed: list[float]) -> float:
    """The largest error, that of each gradient by what is `allowed` of it."""
    grad = torch.randn_like(expected).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    errors = [rms(out.detach(), expected.detach())]
    for own, other, times in zip(actual, exact, allowed, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        errors.append(rms(own.grad, other.grad) / times)
    return max(errors)


def check(nonlinearity: str) -> bool:
    """Forward and every gradient of what backend "auto" runs, in fp32 without tf32 and in bf16."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    good = True
    for dtype, bound in BOUNDS.items():
        shapes = {f"{side}x{side} s_in {a} s_out {b} d {d}": (n, side, a, b, d) for n, side, a, b, d in SHAPES}
        errors = {name: check_crc(shape, dtype, nonlinearity) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            errors[f"{name} in evaluation"] = check_inference(shape, dtype, True, nonlinearity)
        errors |= {f"BN and ReLU{' and pooling' if pool else ''}": check_norm(dtype, pool) for pool in (False, True)}
        if dtype != torch.float32:  # in which other kernels run
            errors["a network's segments apart"] = check_segments(dtype, nonlinearity)
        for name, error in errors.items():
            good &= error < bound
            print(f"check {str(dtype).removeprefix('torch.')} {name}: largest relative error {error:.1e}", flush=True)
    torch.backends.cudnn.allow_tf32 = True
    return good
