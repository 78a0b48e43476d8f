"""`optimize`: the same outputs in every variant, and faster than plain modules."""

from __future__ import annotations

import copy
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from recnets.deploy import optimize, squeeze
from recnets.deploy.bench import plain as plain_modules
from recnets.deploy.fast import FastRecurrent, FastStem
from recnets.deploy.packed import PackedRecurrent
from recnets.deploy.products import ProductRecurrent
from recnets.deploy.winograd import WinogradRecurrent


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest logit."""
    scale = max(1.0, float(expected.abs().max()))
    assert float((got - expected).abs().max()) <= 1e-5 * scale


VARIANTS = [
    {},
    {"head": "hidden"},
    {"nonlinearity": "relu"},
    {"nonlinearity": "shared_bn_relu"},
    {"nonlinearity": "linear"},
    {"recurrent": False},
    {"kernel_x": 1},
    {"kernel_h": 1},
    {"kernel_x": 5, "padding_mode": "circular"},
    {"d": (1, 1, 1)},
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", ["stream", "concat", "packed", "columns", "rows", "winograd"])
@pytest.mark.parametrize("scale", ["folded", "shared"])
def test_same_outputs(trained, overrides, mode, scale):
    model = trained(**overrides)
    x = torch.randn(3, 3, 13, 17)
    with torch.no_grad():
        assert_same(optimize(model, mode=mode, scale=scale, image_size=8)(x), model(x))


def test_every_layer_is_replaced_and_the_model_stays_as_it_is(trained):
    model = trained()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fast = optimize(model)
    assert isinstance(fast.stem, FastStem)
    assert all(isinstance(module, FastRecurrent) for stage in fast.stages for module in stage)
    assert not any(p.requires_grad for p in fast.parameters())
    assert isinstance(model.stem.conv, nn.Conv2d)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("overrides", [{}, {"kernel_x": 1, "kernel_h": 1}, {"kernel_x": 5, "kernel_h": 5}], ids=str)
@pytest.mark.parametrize("mode", ["columns", "rows", "winograd"])
def test_products_on_batches_larger_than_what_is_gathered_at_once(trained, overrides, mode):
    model = trained(**overrides)
    x = torch.randn(7, 3, 20, 24)  # two pictures at a time in the first stage, eight in the second
    with torch.no_grad():
        fast = optimize(model, mode=mode, image_size=8)
        assert all(isinstance(module, ProductRecurrent) for stage in fast.stages for module in stage)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("mode", ["packed", "columns", "rows", "winograd"])
def test_kept_buffers_are_nobody_elses(trained, mode):
    """Products keep their buffers between calls: neither an older result nor another thread may see them change."""
    module = optimize(trained(), mode=mode, image_size=8).stages[0][0]
    model = trained()
    maps = [model.stem(torch.randn(1, 3, 12, 12)).detach() for _ in range(8)]
    expected = [module(x).clone() for x in maps]
    results = [module(x) for x in maps]
    assert all(torch.equal(got, y) for got, y in zip(results, expected, strict=True))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(module, maps), expected))
    assert_same(copy.deepcopy(module).double()(maps[0].double()).float(), expected[0])


@pytest.mark.parametrize("mode", ["packed", "columns", "rows", "winograd"])
def test_an_export_leaves_nothing_behind(trained, mode):
    """Its tensors hold no numbers: kept as buffers they would make every later call wrong."""
    model, x = trained(), torch.randn(2, 3, 16, 16)
    fast = optimize(model, mode=mode, image_size=16)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        fast(fake.from_tensor(x))
    with torch.no_grad():
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("mode", ["stream", "packed", "columns", "rows", "winograd"])
def test_no_pictures(trained, mode):
    assert optimize(trained(), mode=mode, image_size=8)(torch.randn(0, 3, 8, 8)).shape == (0, 10)


def test_a_compiler_takes_convolutions_only(trained):
    with pytest.raises(ValueError, match="compile=True goes with mode 'auto', 'stream' or 'concat', got 'rows'"):
        optimize(trained(), mode="rows", compile=True)


def test_what_cannot_be_written_as_products_says_so(trained):
    module = trained(padding_mode="circular").stages[0][0]
    with pytest.raises(ValueError, match=r"WinogradRecurrent cannot run CRC\(.*zeros around the map"):
        WinogradRecurrent(module)
    with pytest.raises(ValueError, match=r"PackedRecurrent cannot run CRC\(.*zeros around the map"):
        PackedRecurrent(module, 8, 8)
    linear = trained(nonlinearity="linear").stages[0][0]
    with pytest.raises(ValueError, match=r"PackedRecurrent cannot run CRC\(.*a BN or ReLU"):
        PackedRecurrent(linear, 8, 8)
    half = trained().half().stages[0][0]
    with pytest.raises(ValueError, match="float32 or float64"):
        WinogradRecurrent(half)


def test_squeezed(trained):
    small = squeeze(trained(dead=0.4), 0.0)
    x = torch.randn(3, 3, 13, 17)
    with torch.no_grad():
        for mode in ("stream", "concat", "packed", "columns", "rows", "winograd"):
            assert_same(optimize(small, mode=mode, image_size=8)(x), small(x))


def test_packed_weights_are_packed_again_in_a_copy(trained, tmp_path):
    model, x = trained(), torch.randn(2, 3, 16, 16)
    fast = optimize(model, mode="packed", image_size=16)
    assert all(isinstance(module, PackedRecurrent) and module.packed for stage in fast.stages for module in stage)
    torch.save(fast, tmp_path / "fast.pt")
    with torch.no_grad():
        expected = fast(x)
        for again in (copy.deepcopy(fast), torch.load(tmp_path / "fast.pt", weights_only=False)):
            assert all(module.packed for stage in again.stages for module in stage)
            assert torch.equal(again(x), expected)
        # Other types run unpacked, and can come back.
        assert_same(fast.double()(x.double()).float(), expected)
        assert torch.equal(fast.float()(x), expected)
    assert not expected.is_inference()


def test_packed_convolutions_are_counted_and_switched_off_with_onednn(trained):
    model, x = trained(), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        flops = []
        for mode, enabled in (("concat", True), ("packed", True), ("packed", False)):
            fast = optimize(model, mode=mode, scale="folded", image_size=16)
            with torch.backends.mkldnn.flags(enabled=enabled), FlopCounterMode(display=False) as counter:
                assert_same(fast(x), model(x))
            counted = counter.get_flop_counts()["Global"]
            flops.append(sum(v for k, v in counted.items() if "conv" in str(k)))
            assert any("pointwise" in str(k) for k in counted) == (mode == "packed" and enabled)
    assert flops[0] == flops[2] < flops[1]  # packed, the transition is a convolution too


def test_large_folded_weights_follow_a_change_of_type(trained):
    model = trained()
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        got = optimize(model, mode="stream", scale="folded").double()(x)
        assert got.dtype == torch.float64
        assert_same(got, model.double()(x))


def test_other_models_pass_through(trained):
    model = trained("wrn_40_1")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_same(optimize(model)(x), model(x))


def test_unknown_mode_is_named(trained):
    with pytest.raises(ValueError, match=r"mode must be one of .*'stream'.*got 'steam'"):
        optimize(trained(), mode="steam")


@pytest.mark.slow
def test_compiled(trained):
    model = trained("RecNet(2, 4, 2)")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_same(optimize(model, compile=True, fullgraph=True, image_size=8)(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recnet_60_480", "recnet_60_1280"])
def test_faster_than_plain_modules_and_the_same(trained, name):
    """Medians of interleaved runs on one thread, by its own CPU time: neighbours on the machine change neither.

    On one thread arithmetic weighs more than on two, so this bar lies below what two quiet cores give.
    """
    model = trained(name, num_classes=100)
    plain = plain_modules(model)
    x = torch.randn(1, 3, 32, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            fast = optimize(model)
            assert_same(fast(x), plain(x))
            taken: dict[str, list[float]] = {"plain": [], "fast": []}
            for _ in range(25):
                for key, run in (("plain", plain), ("fast", fast)):
                    start = time.thread_time()
                    run(x)
                    taken[key].append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert statistics.median(taken["plain"]) > 1.15 * statistics.median(taken["fast"])
