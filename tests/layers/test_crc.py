"""The CRC layer is the naive loop: output, every gradient and the running statistics, in float64."""

import itertools

import pytest
import torch
from torch import nn

from recnets.layers import CRC, MODES, NONLINEARITIES, PADDING_MODES, Recurrent

KERNELS = [(3, 3), (3, 1), (1, 3), (5, 3), (1, 1)]
# d, s_in, s_out, N, H, W: one step, odd steps, one channel, one picture, H != W, maps smaller than a kernel.
SHAPES = [(1, 3, 2, 2, 5, 3), (3, 1, 4, 1, 4, 7), (7, 2, 3, 3, 2, 3), (3, 3, 1, 2, 1, 6)]


def inputs(layer, n, height, width):
    return torch.randn(n, layer.d * layer.s_in, height, width, dtype=torch.float64)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "grouped"])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: f"{k[0]}x{k[1]}")
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_against_naive(nonlinearity, kernels, recurrent, training, randomise, compare):
    for d, s_in, s_out, n, height, width in SHAPES:
        layer = CRC(
            s_in, s_out, d, kernel_x=kernels[0], kernel_h=kernels[1], nonlinearity=nonlinearity, recurrent=recurrent
        )
        compare(randomise(layer).train(training), inputs(layer, n, height, width))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "grouped"])
@pytest.mark.parametrize("padding_mode", PADDING_MODES)
def test_padding_modes(padding_mode, recurrent, training, randomise, compare):
    for nonlinearity, kernels in itertools.product(("separate_bn_relu", "linear"), [(3, 3), (1, 3), (5, 3)]):
        layer = CRC(
            2,
            3,
            3,
            kernel_x=kernels[0],
            kernel_h=kernels[1],
            nonlinearity=nonlinearity,
            recurrent=recurrent,
            padding_mode=padding_mode,
        )
        compare(randomise(layer).train(training), inputs(layer, 2, 4, 5))


@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "grouped"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_several_training_steps(nonlinearity, recurrent, randomise, make_spec, assert_near):
    """The parameters and running statistics follow the specification through SGD, and so does evaluation after."""
    layer = randomise(CRC(2, 3, 3, nonlinearity=nonlinearity, recurrent=recurrent))
    spec = make_spec(layer)
    ours = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD([t for t in spec.tensors.values() if t.requires_grad], lr=0.05, momentum=0.9)
    for step in range(1, 5):
        x = inputs(layer, 2, 4, 3)
        for optimiser, out in ((ours, layer(x)), (theirs, spec(x))):
            optimiser.zero_grad()
            out.square().mean().backward()
            optimiser.step()
        spec.compare_tensors(1e-9)
        if layer.norm is not None:
            # One BN that is called at each of d steps counts d batches, as the module itself would.
            calls = layer.d if nonlinearity == "shared_bn_relu" else 1
            assert layer.norm.num_batches_tracked.item() == step * calls
    layer.eval()
    assert_near(layer(x), spec(x), "output in evaluation", 1e-9)
    if layer.norm is not None:
        assert layer.norm.num_batches_tracked.item() == 4 * calls


def test_gradcheck(randomise):
    layer = randomise(CRC(1, 2, 3)).eval()
    assert torch.autograd.gradcheck(layer, inputs(layer, 1, 3, 2).requires_grad_())


@pytest.mark.parametrize(
    ("nonlinearity", "bias", "norm"),
    [("relu", True, None), ("shared_bn_relu", False, 4), ("separate_bn_relu", False, 12), ("linear", True, 12)],
)
def test_parameters(nonlinearity, bias, norm):
    layer = CRC(2, 4, 3, kernel_x=5, kernel_h=1, nonlinearity=nonlinearity)
    assert layer.weight_x.shape == (4, 2, 5, 5)
    assert layer.weight_h.shape == (4, 4, 1, 1)
    assert (layer.bias is not None) == bias
    assert norm is None if layer.norm is None else layer.norm.num_features == norm
    grouped = CRC(2, 4, 3, kernel_x=5, kernel_h=1, nonlinearity=nonlinearity, recurrent=False)
    assert {k: v.shape for k, v in grouped.state_dict().items()} == {k: v.shape for k, v in layer.state_dict().items()}


def test_worked_example_of_the_paper():
    """160 channels in and 640 out in 10 segments: 46,080 weights and 1,280 of BN."""
    layer = CRC(16, 64, 10)
    assert sum(p.numel() for p in layer.parameters()) == 47_360
    assert layer.weight_x.numel() + layer.weight_h.numel() == 46_080


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("recurrent", [True, False])
def test_starts_at_a_sane_scale(nonlinearity, recurrent):
    """Unit-variance input gives hidden states that neither vanish nor explode by the last of 20 steps."""
    layer = CRC(8, 32, 20, nonlinearity=nonlinearity, recurrent=recurrent)
    out = layer(torch.randn(4, 160, 8, 8))
    assert out.isfinite().all()
    assert 0.1 < out[:, -32:].std().item() < 10


def test_norm_slices_belong_to_steps(randomise):
    """Killing slice i of the norm silences h_i and nothing before it."""
    layer = randomise(CRC(2, 3, 4)).eval()
    x = inputs(layer, 1, 4, 4)
    before = layer(x)
    with torch.no_grad():
        layer.norm.weight[6:9] = 0
        layer.norm.bias[6:9] = -1
        after = layer(x)
    assert torch.allclose(before[:, :6], after[:, :6])
    assert (after[:, 6:9] == 0).all()
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_norm_without_affine_or_running_statistics(randomise):
    """A replaced norm keeps its meaning: a slice a step, with or without weights and running statistics."""
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    plain = CRC(2, 3, 3).double()
    for options in ({"affine": False}, {"track_running_stats": False}):
        layer = CRC(2, 3, 3).double()
        layer.load_state_dict(plain.state_dict())
        layer.norm = nn.BatchNorm2d(9, **options).double()
        assert torch.allclose(layer(x), plain(x), atol=1e-12)
        layer.eval()
        with torch.no_grad():
            out = layer(x)
        assert out.isfinite().all()
        if "track_running_stats" in options:
            assert torch.allclose(out, plain(x), atol=1e-12)


def test_cumulative_average_of_a_shared_norm_is_refused():
    layer = CRC(2, 3, 3, nonlinearity="shared_bn_relu")
    layer.norm.momentum = None
    with pytest.raises(ValueError, match=r"momentum=None .* shared by 3 steps"):
        layer(torch.zeros(1, 6, 4, 4))


# Wrong use.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"d": 0}, ValueError, "d must be at least 1, got 0"),
        ({"d": -2}, ValueError, "d must be at least 1, got -2"),
        ({"d": 2.0}, TypeError, "d must be an int, got 2.0 of type float"),
        ({"d": True}, TypeError, "d must be an int, got True of type bool"),
        ({"s_in": 0}, ValueError, "s_in must be at least 1, got 0"),
        ({"s_out": "4"}, TypeError, "s_out must be an int, got '4' of type str"),
        ({"kernel_x": 2}, ValueError, "kernel_x must be odd.*got 2"),
        ({"kernel_h": 4}, ValueError, "kernel_h must be odd.*got 4"),
        ({"kernel_h": 0}, ValueError, "kernel_h must be at least 1, got 0"),
        ({"kernel_x": (3, 3)}, TypeError, r"kernel_x must be an int, got \(3, 3\)"),
        ({"nonlinearity": "seperate_bn_relu"}, ValueError, "got 'seperate_bn_relu'; did you mean 'separate_bn_relu'"),
        ({"nonlinearity": None}, ValueError, "nonlinearity must be one of 'relu', .*, got None"),
        ({"padding_mode": "zero"}, ValueError, "padding_mode must be one of 'zeros', .*did you mean 'zeros'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'torch', 'triton', got 'cuda'"),
        ({"recurrent": "no"}, TypeError, "recurrent must be True or False, got 'no'"),
    ],
)
def test_wrong_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        CRC(**{"s_in": 2, "s_out": 4, "d": 3, **arguments})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(1, 7, 4, 4), ValueError, r"CRC\(2, 4, 3\) expects 6 channels, got 7"),
        (torch.zeros(6, 4, 4), ValueError, r"expects \(N, 6, H, W\), got a tensor of shape \(6, 4, 4\)"),
        (torch.zeros(1, 6, 4), ValueError, r"got a tensor of shape \(1, 6, 4\)"),
        ([[0.0]], TypeError, "expects a Tensor, got list"),
        (torch.zeros(1, 6, 0, 4), ValueError, r"at least one pixel.*\(1, 6, 0, 4\)"),
        (torch.zeros(1, 6, 4, 4, dtype=torch.uint8), TypeError, r"floating point.*torch.uint8"),
        (torch.zeros(1, 6, 4, 4, dtype=torch.float64), TypeError, r"weights of torch.float32.*got torch.float64"),
        (torch.zeros(1, 6, 4, 4, dtype=torch.float16), TypeError, r"weights of torch.float32.*got torch.float16"),
    ],
)
def test_wrong_input(x, error, message):
    with pytest.raises(error, match=message):
        CRC(2, 4, 3)(x)


@pytest.mark.parametrize(
    ("padding_mode", "kernel", "side", "smallest"),
    [("reflect", 3, 1, 2), ("reflect", 7, 3, 4), ("circular", 7, 2, 3), ("circular", 3, 1, 1), ("replicate", 7, 1, 1)],
)
def test_maps_too_small_for_their_padding(padding_mode, kernel, side, smallest):
    for sizes in ({"kernel_x": kernel}, {"kernel_h": kernel}):
        options = {"kernel_x": 1, "kernel_h": 1, **sizes}
        layers = [CRC(2, 4, 3, padding_mode=padding_mode, **options)]
        layers += [Recurrent(2, 4, 5, 3, padding_mode=padding_mode, mode=mode, **options) for mode in MODES]
        for layer in layers:
            assert layer.eval()(torch.zeros(1, 6, smallest, smallest)).shape[2:] == (smallest, smallest)
            if side < smallest:
                with pytest.raises(ValueError, match=rf"{padding_mode!r}.* {smallest}×{smallest} pixels, got 9×{side}"):
                    layer(torch.zeros(1, 6, 9, side))
    alone = CRC(2, 4, 1, kernel_x=1, kernel_h=kernel, padding_mode=padding_mode)  # one step never uses W_h
    assert alone.eval()(torch.zeros(1, 2, 1, 1)).shape == (1, 4, 1, 1)


def test_repr_tells_what_differs():
    assert repr(CRC(2, 4, 3)).startswith("CRC(\n  2, 4, 3, kernel_x=3, kernel_h=3, nonlinearity='separate_bn_relu'")
    text = repr(CRC(2, 4, 3, recurrent=False, padding_mode="circular", backend="torch"))
    assert "recurrent=False, padding_mode='circular', backend='torch'" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_a_layer_is_traced_alike_with_gradients_and_without(nonlinearity):
    """torch.jit.trace runs a layer with gradients and checks the graph without."""
    layer, x = CRC(2, 4, 3, nonlinearity=nonlinearity).eval(), torch.randn(2, 6, 5, 5)
    traced = torch.jit.trace(layer, x)
    with torch.no_grad():
        torch.testing.assert_close(traced(x), layer(x))
