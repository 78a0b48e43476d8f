"""Eq. 5: the linear recursion by composed kernels, and where it is exact."""

import pytest
import torch

from recnets.layers import CRC
from recnets.ops import naive, parallel

KERNELS = [(3, 3), (3, 1), (1, 3), (5, 3), (3, 5)]


def linear(kernel_x, kernel_h, d, padding_mode, s_in=2, s_out=3):
    layer = CRC(
        s_in, s_out, d, kernel_x=kernel_x, kernel_h=kernel_h, nonlinearity="linear", padding_mode=padding_mode
    ).double()
    torch.nn.init.normal_(layer.bias)
    layer.norm.running_var.uniform_(0.5, 2.0)
    layer.norm.running_mean.normal_()
    return layer


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("kernels", KERNELS, ids=str)
def test_circular_is_exact_on_the_whole_map(kernels, d, randomise, assert_near):
    """In training too; composed kernels may wrap around the map more than once."""
    layer = randomise(linear(*kernels, d, "circular"))
    for training in (False, True):
        layer.train(training)
        ours = torch.randn(2, 2 * d, 5, 7, dtype=torch.float64, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        out, expected = layer.forward_parallel(ours), layer(theirs)
        assert_near(out, expected, "output")
        probe = torch.randn_like(out)
        used = [p for name, p in layer.named_parameters() if d > 1 or name != "weight_h"]
        gradients = torch.autograd.grad((out * probe).sum(), [ours, *used])
        references = torch.autograd.grad((expected * probe).sum(), [theirs, *used])
        for gradient, reference in zip(gradients, references, strict=True):
            assert_near(gradient, reference, "gradient", 1e-9)


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
def test_zeros_is_exact_on_the_interior_only(kernels, assert_near):
    d = 4
    layer = linear(*kernels, d, "zeros").eval()
    border = parallel.border(kernels[1], d)
    side = 2 * border + 4
    x = torch.randn(1, 2 * d, side, side + 1, dtype=torch.float64)
    with torch.no_grad():
        difference = (layer.forward_parallel(x) - layer(x)).abs()
    interior = difference[:, :, border : side - border, border : side + 1 - border]
    assert interior.numel() > 0
    assert interior.max() < 1e-10
    if kernels[1] > 1:  # a 1×1 W_h never looks outside, so there is nothing to drop
        outside = difference.clone()
        outside[:, :, border : side - border, border : side + 1 - border] = 0
        assert outside.max() > 1e-3
        assert (difference[:, :3] < 1e-10).all()  # h_0 has had no step that could drop anything
    else:
        assert difference.max() < 1e-10


def test_border_is_tight():
    """One pixel nearer to the edge than `border` says, the last state differs."""
    d, border = 3, parallel.border(5, 3)
    assert border == 4
    layer = linear(3, 5, d, "zeros").eval()
    with torch.no_grad():
        layer.norm.bias.fill_(50.0)  # keep ReLU from hiding the difference
        x = torch.randn(4, 2 * d, 12, 12, dtype=torch.float64)
        difference = (layer.forward_parallel(x) - layer(x))[:, -3:].abs().amax(dim=(0, 1))
    assert difference[border:-border, border:-border].max() < 1e-10
    assert difference[border - 1].max() > 1e-6


def test_kernels_and_biases():
    layer = linear(5, 3, 4, "circular")
    kernels, biases = layer.parallel_kernels()
    assert [tuple(k.shape) for k in kernels] == [(3, 2, 5 + 2 * m, 5 + 2 * m) for m in range(4)]
    assert [tuple(b.shape) for b in biases] == [(3,)] * 4
    assert torch.equal(kernels[0], layer.weight_x)
    assert torch.equal(biases[0], layer.bias)


def test_compose_is_one_convolution_after_another(assert_near):
    first, second = torch.randn(3, 2, 5, 5).double(), torch.randn(4, 3, 3, 3).double()
    x = torch.randn(1, 2, 6, 9, dtype=torch.float64)
    chained = naive.conv(naive.conv(x, first, "circular"), second, "circular")
    assert_near(naive.conv(x, parallel.compose(first, second), "circular"), chained, "output")


def test_wrong_use():
    for options in ({}, {"nonlinearity": "relu"}, {"nonlinearity": "linear", "recurrent": False}):
        layer = CRC(2, 3, 2, **options)
        with pytest.raises(ValueError, match=r"Eq. 5.*nonlinearity='linear' with recurrent=True, this layer has"):
            layer.parallel_kernels()
        with pytest.raises(ValueError, match=r"Eq. 5"):
            layer.forward_parallel(torch.zeros(1, 4, 4, 4))
    layer = linear(3, 3, 2, "reflect")
    with pytest.raises(ValueError, match="padding_mode 'zeros' or 'circular', got 'reflect'"):
        layer.forward_parallel(torch.zeros(1, 4, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expects 4 channels, got 5"):
        linear(3, 3, 2, "zeros").forward_parallel(torch.zeros(1, 5, 4, 4, dtype=torch.float64))
