"""The specification itself, against PyTorch's own modules put together as the paper's equations say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recnets.ops import naive

D, S_IN, S_OUT = 3, 2, 4


def loop_of_modules(x, conv_x, conv_h, norms, nonlinearity, recurrent):
    """Eq. 2, 3 and 4 with one nn.BatchNorm2d a step (or the same one at every step)."""
    hidden, h = [], None
    for i, x_i in enumerate(x.split(S_IN, dim=1)):
        z = conv_h(conv_x(x_i)) if not recurrent else conv_x(x_i)
        if recurrent and h is not None:
            z = z + conv_h(h)
        h = z if nonlinearity == "linear" else F.relu(norms[i](z))
        hidden.append(F.relu(norms[i](z)) if nonlinearity == "linear" else h)
    return torch.cat(hidden, dim=1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("nonlinearity", ["relu", "shared_bn_relu", "separate_bn_relu", "linear"])
def test_against_modules(nonlinearity, recurrent, training, assert_near):
    has_bias = nonlinearity in ("relu", "linear")
    conv_x = nn.Conv2d(S_IN, S_OUT, 3, padding=1, bias=has_bias and recurrent).double()
    conv_h = nn.Conv2d(S_OUT, S_OUT, 3, padding=1, bias=has_bias and not recurrent).double()
    bias = conv_x.bias if recurrent else conv_h.bias
    if nonlinearity == "relu":
        norms = [nn.Identity()] * D
    elif nonlinearity == "shared_bn_relu":
        norms = [nn.BatchNorm2d(S_OUT).double().train(training)] * D
    else:
        norms = [nn.BatchNorm2d(S_OUT).double().train(training) for _ in range(D)]
    bns = [n for n in dict.fromkeys(norms) if isinstance(n, nn.BatchNorm2d)]
    for bn in bns:
        nn.init.uniform_(bn.weight, 0.5, 1.5)
        nn.init.normal_(bn.bias)
        bn.running_var.uniform_(0.5, 2.0)
    own = None
    if bns:
        names = ("running_mean", "running_var", "weight", "bias")
        own = tuple(torch.cat([getattr(bn, n).detach().clone() for bn in bns]) for n in names)
    x = torch.randn(2, D * S_IN, 5, 4, dtype=torch.float64)
    options = {"d": D, "nonlinearity": nonlinearity, "recurrent": recurrent, "training": training}
    for _ in range(2):
        out = naive.crc(x, conv_x.weight, conv_h.weight, bias, own, **options)
        assert_near(out, loop_of_modules(x, conv_x, conv_h, norms, nonlinearity, recurrent), "output", 1e-12)
    if own is not None:
        assert_near(own[0], torch.cat([bn.running_mean for bn in bns]), "running mean", 1e-12)
        assert_near(own[1], torch.cat([bn.running_var for bn in bns]), "running variance", 1e-12)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_conv_against_module(kernel, padding_mode, assert_near):
    module = nn.Conv2d(2, 3, kernel, padding=kernel // 2, padding_mode=padding_mode, bias=False).double()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    assert_near(naive.conv(x, module.weight, padding_mode), module(x), "output", 1e-13)


def test_by_hand():
    """One pixel, one channel: h_0 = relu(6 - 1) = 5, h_1 = relu(-8 + 15 - 1) = 6, h_2 = relu(-20 + 18 - 1) = 0."""
    x = torch.tensor([3.0, -4.0, -10.0]).reshape(1, 3, 1, 1)
    w_x, w_h, bias = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 3.0), torch.tensor([-1.0])
    assert naive.crc(x, w_x, w_h, bias, d=3, nonlinearity="relu").flatten().tolist() == [5.0, 6.0, 0.0]
    grouped = naive.crc(x, w_x, w_h, bias, d=3, nonlinearity="relu", recurrent=False)
    assert grouped.flatten().tolist() == [17.0, 0.0, 0.0]


def test_any_dtype():
    x, w = torch.randn(1, 2, 3, 3), torch.randn(1, 1, 3, 3)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = naive.crc(x.to(dtype), w.to(dtype), w.to(dtype), d=2, nonlinearity="relu")
        assert out.dtype == dtype
