"""The Recurrent module: one result in every mode, and no wide tensor where it streams."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from recnets.layers import MODES, NONLINEARITIES, Recurrent, recurrent

KERNELS = [(3, 3), (3, 1), (1, 3), (5, 3)]
SHAPES = [(1, 3, 2, 4, 2, 5, 3), (3, 1, 4, 5, 1, 4, 7), (7, 2, 3, 1, 2, 2, 3)]  # d, s_in, s_out, c_out, N, H, W


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "grouped"])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: f"{k[0]}x{k[1]}")
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_every_mode_against_naive(nonlinearity, kernels, recurrent, training, randomise, compare):
    options = {"nonlinearity": nonlinearity, "kernel_x": kernels[0], "kernel_h": kernels[1], "recurrent": recurrent}
    for d, s_in, s_out, c_out, n, height, width in SHAPES:
        module = randomise(Recurrent(s_in, s_out, c_out, d, **options)).train(training)
        x = torch.randn(n, d * s_in, height, width, dtype=torch.float64)
        for mode in MODES:
            module.mode = mode
            compare(copy.deepcopy(module), x)


@pytest.mark.parametrize("padding_mode", ["circular", "reflect", "replicate"])
def test_padding_modes(padding_mode, randomise, compare):
    module = randomise(Recurrent(2, 3, 4, 3, padding_mode=padding_mode))
    for mode in MODES:
        module.mode = mode
        compare(copy.deepcopy(module).eval(), torch.randn(2, 6, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_running_statistics_after_training(nonlinearity, mode, randomise, make_spec):
    """With gradients and without (statistics may be gathered in a pass that trains nothing)."""
    module = randomise(Recurrent(2, 3, 4, 3, nonlinearity=nonlinearity, mode=mode))
    spec = make_spec(module)
    for step in range(1, 5):
        x = torch.randn(2, 6, 4, 3, dtype=torch.float64)
        with torch.set_grad_enabled(step % 2 == 0):
            module(x)
        spec(x)
        assert module.transition.norm.num_batches_tracked.item() == step
        if module.crc.norm is not None:
            calls = 3 if nonlinearity == "shared_bn_relu" else 1
            assert module.crc.norm.num_batches_tracked.item() == step * calls
    spec.compare_tensors()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_replaced_norms(options, mode):
    """Norms without weights or without running statistics mean the same in every mode."""
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    reference = Recurrent(2, 3, 4, 3, mode="concat").double()
    module = Recurrent(2, 3, 4, 3, mode=mode).double()
    module.load_state_dict(reference.state_dict())
    for m in (reference, module):
        m.crc.norm = nn.BatchNorm2d(9, **options).double()
        m.transition.norm = nn.BatchNorm2d(4, **options).double()
    for training in (True, False):
        with torch.no_grad():
            out = module.train(training)(x)
        torch.testing.assert_close(out, reference.train(training)(x), rtol=1e-10, atol=1e-10)


# What streaming promises.


class Allocations(TorchDispatchMode):
    """Records, for every operation, the largest new storage in elements."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


D, S_IN, S_OUT, C_OUT, N, SIDE = 10, 2, 8, 16, 2, 12
STATE = N * S_OUT * SIDE * SIDE
WIDE = D * STATE


def largest_allocation(module, x):
    with Allocations(x, *module.parameters(), *module.buffers()) as allocations:
        module(x)
    return allocations.largest


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "options",
    [{"nonlinearity": n} for n in NONLINEARITIES]
    + [{"kernel_h": 1}, {"recurrent": False}, {"padding_mode": "circular"}, {"nonlinearity": "linear", "kernel_x": 1}],
    ids=str,
)
def test_streaming_never_allocates_the_hidden_states(options, training, memory_format):
    """Nothing larger than the output and a padded state with its input segment: far from d·s_out channels."""
    module = Recurrent(S_IN, S_OUT, C_OUT, D, **options).train(training)
    x = torch.randn(N, D * S_IN, SIDE, SIDE).to(memory_format=memory_format)
    bound = max(N * C_OUT * SIDE**2, N * (S_IN + S_OUT) * (SIDE + 2) ** 2)
    assert bound < WIDE / 2
    with torch.no_grad():
        assert largest_allocation(module, x) <= bound
        module.mode = "concat"
        assert largest_allocation(module, x) >= WIDE  # so the bound above means something


def frozen(module):
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("prepare", "x_needs_grad", "context", "streams"),
    [
        (None, False, torch.enable_grad, False),
        (None, False, torch.no_grad, True),
        (None, True, torch.no_grad, True),
        (None, False, torch.inference_mode, True),
        (frozen, False, torch.enable_grad, True),
        (frozen, True, torch.enable_grad, False),
        (lambda m: frozen(m).transition.norm.bias.requires_grad_(True), False, torch.enable_grad, False),
    ],
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_auto_streams_when_no_gradient_is_needed(prepare, x_needs_grad, context, streams, training):
    module = Recurrent(S_IN, S_OUT, C_OUT, D).train(training)
    if prepare:
        prepare(module)
    x = torch.randn(N, D * S_IN, SIDE, SIDE, requires_grad=x_needs_grad)
    with context():
        assert (largest_allocation(module, x) < WIDE) == streams


# Other number formats.


@pytest.mark.parametrize("mode", ["concat", "stream"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_half_precision_and_autocast(nonlinearity, dtype, training, mode, randomise):
    module = randomise(Recurrent(3, 4, 5, 3, nonlinearity=nonlinearity, mode=mode)).train(training)
    x = torch.randn(2, 9, 6, 5, dtype=torch.float64)
    expected = module(x).detach()
    half, single = copy.deepcopy(module).to(dtype), copy.deepcopy(module).float()
    bound = 0.1 if dtype == torch.bfloat16 else 0.02

    def check(out):
        assert out.dtype == dtype
        error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < bound, error

    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            check(half(x.to(dtype)))
            with torch.autocast("cpu", dtype=dtype):
                check(single(x.float()))


@pytest.mark.parametrize("mode", ["concat", "stream"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_channels_last(mode, training, randomise, compare):
    module = randomise(Recurrent(2, 3, 4, 3, mode=mode)).train(training).to(memory_format=torch.channels_last)
    compare(module, torch.randn(2, 6, 5, 4, dtype=torch.float64).to(memory_format=torch.channels_last))


def test_input_that_is_a_view(randomise, compare):
    module = randomise(Recurrent(2, 3, 4, 3)).eval()
    compare(module, torch.randn(2, 8, 9, 5, dtype=torch.float64)[:, 1:7, ::2])


def test_wrong_use():
    with pytest.raises(ValueError, match="mode must be one of 'auto', 'concat', 'stream', got 'streem'; did you mean"):
        Recurrent(2, 3, 4, 3, mode="streem")
    with pytest.raises(ValueError, match="c_out must be at least 1, got 0"):
        Recurrent(2, 3, 0, 3)
    with pytest.raises(ValueError, match="kernel_h must be odd"):
        Recurrent(2, 3, 4, 3, kernel_h=2)
    with pytest.raises(TypeError, match="stride"):
        Recurrent(2, 3, 4, 3, stride=2)
    for mode in MODES:
        with pytest.raises(ValueError, match="expects 6 channels, got 5"):
            Recurrent(2, 3, 4, 3, mode=mode)(torch.zeros(1, 5, 4, 4))


def test_mode_is_checked_whenever_it_is_set():
    module = Recurrent(2, 3, 4, 3)
    text, names = repr(module), list(module.state_dict())
    with pytest.raises(ValueError, match="mode must be one of 'auto', 'concat', 'stream', got 'conat'; did you mean"):
        module.mode = "conat"
    assert module.mode == "auto"
    module.mode = "concat"
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.mode == "concat"
    assert repr(module) == text
    assert list(module.state_dict()) == names


# Other kinds of derivative, and what inference gives back.


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_derivatives(mode, randomise):
    module = randomise(Recurrent(2, 3, 4, 3, mode=mode)).eval().requires_grad_(False)
    x, tangent = (torch.randn(2, 6, 5, 4, dtype=torch.float64) for _ in range(2))
    _, got = torch.func.jvp(module, (x,), (tangent,))
    step = 1e-6
    expected = (module(x + step * tangent) - module(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_output_of_inference_may_take_part_in_training(randomise):
    module = randomise(Recurrent(2, 3, 4, 3)).eval()
    with torch.no_grad():
        features = module(torch.randn(1, 6, 5, 4, dtype=torch.float64))
    weight = torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True)
    (features * weight).sum().backward()
    torch.testing.assert_close(weight.grad.flatten(), features.sum(dim=(0, 2, 3)))


@pytest.mark.parametrize(("s_out", "side"), [(8, 3), (8, 9), (8, 70), (64, 16)])
@pytest.mark.parametrize("onednn", [True, False])
def test_inference_with_and_without_onednn(s_out, side, onednn, randomise):
    """Small maps, one convolution of [x, h], and two."""
    module = randomise(Recurrent(2, s_out, 5, 3)).eval()
    x = torch.randn(1, 6, side, side + 1)
    expected = module(x.double()).detach()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=onednn):
        assert float((module.float()(x) - expected).abs().max() / expected.abs().max()) < 1e-5


def test_training_streams_on_a_cpu_where_all_states_together_are_large(monkeypatch, compare, randomise):
    module = randomise(Recurrent(2, 3, 4, 3)).train()
    streamed = []
    stream = module._stream
    monkeypatch.setattr(module, "_stream", lambda x: streamed.append(True) or stream(x))
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    states = 2 * 3 * 3 * 5 * 5 * 8  # bytes
    for widest, expected in ((states, []), (states - 1, [True])):
        monkeypatch.setattr(recurrent, "WIDEST", widest)
        streamed.clear()
        module(x)
        assert streamed == expected
    compare(module, x)
    streamed.clear()
    calls = []
    module.crc.register_forward_hook(lambda *_: calls.append(True))  # who looks at the layer sees it called
    module(x)
    assert (streamed, calls) == ([], [True])


@pytest.mark.parametrize("name", ["crc", "transition"])
def test_hooks_are_called_in_inference_too(name, randomise):
    module = randomise(Recurrent(2, 3, 4, 3)).eval()
    x = torch.randn(1, 6, 5, 4, dtype=torch.float64)
    seen = []
    with torch.no_grad():
        expected = module(x)
        module.get_submodule(name).register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
        torch.testing.assert_close(module(x), expected)
        assert seen == [(1, 9 if name == "crc" else 4, 5, 4)]
        module.mode = "stream"  # who asks for it has it
        module(x)
    assert len(seen) == 1


def test_a_pruned_layer_trains_with_large_states(monkeypatch):
    monkeypatch.setattr(recurrent, "WIDEST", 0)
    module = Recurrent(2, 3, 4, 3)
    prune.custom_from_mask(module.crc, "weight_x", torch.rand_like(module.crc.weight_x) > 0.5)
    for _ in range(2):
        module(torch.randn(2, 6, 5, 5)).sum().backward()


def test_a_module_pickled_with_a_plain_mode_still_runs():
    module = Recurrent(2, 3, 4, 3, mode="stream")
    state = {**module.__dict__, "mode": "concat"}
    del state["_mode"]
    old = Recurrent.__new__(Recurrent)
    old.__setstate__(state)
    assert old.mode == "concat"
    old(torch.randn(1, 6, 4, 4))
