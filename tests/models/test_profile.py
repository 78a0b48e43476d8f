"""`profile`: figures that can be worked out by hand, and the same ones for every model that is registered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recnets import RecNet, Recurrent, create_model, list_models, profile
from recnets.models.profile import check_image_size, count_macs, count_parameters, peak_live_bytes, receptive_field
from recnets.ops import dispatch


def test_main_model():
    found = profile(create_model("recnet_60_1280"))
    assert found.parameters == 1_704_250
    # Six CRC layers that cost the same; the first step has no W_h.
    convolutions = 1024 * 9 * (10 * 8 * 32 + 9 * 32 * 32)
    assert found.crc_macs == 6 * convolutions
    transitions = 1024 * 320 * (80 + 160) + 256 * 640 * (160 + 320) + 64 * 1280 * (320 + 320)
    assert found.macs == 1024 * 27 * 80 + 6 * convolutions + transitions + 320 * 10
    assert found.macs == 863_095_936


def test_papers_formula():
    """H·W·(C_in + C_out)·C_out·k²/d + 2·H·W·C_out."""
    row = next(r for r in profile(create_model("recnet_60_1280")).layers if r.layer == "CRC (16, 64, 10)")
    assert row.paper_macs == 256 * (160 + 640) * 640 * 9 // 10 + 2 * 256 * 640
    model = RecNet(2, (3,), (4,), kernel_x=1, kernel_h=5)
    row = next(r for r in profile(model, 8).layers if r.paper_macs is not None)
    assert row.paper_macs == 64 * (12 * 24 * 1 + 24 * 24 * 25) // 4 + 2 * 64 * 24


@pytest.mark.parametrize("name", list_models())
def test_rows_add_up_in_every_model(name):
    with torch.device("meta"):
        model = create_model(name)
    found = profile(model)
    assert sum(row.parameters for row in found.layers) == found.parameters == count_parameters(model)
    assert sum(row.macs for row in found.layers) == found.macs == count_macs(model)
    assert found.layers[-1].out_channels == 10
    if isinstance(model, RecNet):
        assert found.peak_stream < found.peak_concat
        assert found.receptive_field
    else:
        assert found.peak_stream == found.peak_concat
        assert found.receptive_field is None
        assert found.crc_macs == found.crc_macs_paper == 0


def test_streaming_does_the_same_arithmetic():
    """The counter does not know addmm_, the running sum; the convolutions are those of concat mode."""
    model = RecNet(2, (2, 3), (3, 4)).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    counted = counter.get_flop_counts()["Global"]
    convolutions = sum(v for k, v in counted.items() if "convolution" in str(k)) // 2
    rows = profile(model, 8).layers
    transitions = sum(row.macs for row in rows if row.layer.startswith("TB"))
    assert convolutions == sum(row.macs for row in rows) - transitions - rows[-1].macs


def positive(model):
    """Every path open: with positive weights and no max to choose by, every pixel that can matter does."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0)
    for module in model.modules():
        if isinstance(module, RecNet):
            module.pool = nn.AvgPool2d(2)
    return model.double().eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"kernel_x": 1}, {"kernel_h": 1}, {"kernel_x": 5, "kernel_h": 3}, {"recurrent": False}],
    ids=str,
)
def test_receptive_field_is_what_gradients_reach(options):
    model = positive(RecNet(1, (1, 1), (3, 2), **options))
    expected = receptive_field(model)
    x = torch.rand(1, 3, 96, 96, dtype=torch.float64, requires_grad=True)
    model.forward_features(x)[0, :, 24, 24].sum().backward()
    seen = x.grad[0].abs().sum(0) > 0
    rows, columns = seen.any(1).nonzero(), seen.any(0).nonzero()
    assert rows.max() - rows.min() + 1 == expected
    assert columns.max() - columns.min() + 1 == expected


def test_live_tensors_counted_by_hand():
    class Steps(nn.Module):
        def forward(self, x):
            a = x + 1  # x, a
            b = a * 2  # x, a, b: the peak
            del a
            return b.view(-1)[:2].sum() + b.new_ones(1)  # views cost nothing

    x = torch.zeros(100)
    assert peak_live_bytes(Steps(), x) == 3 * 400
    linear = nn.Linear(100, 10)
    with torch.no_grad():
        assert peak_live_bytes(linear, x) == 400 + 40  # weights and their views are not counted


@pytest.mark.parametrize("mode", ["concat", "stream"])
def test_the_copy_without_storage_measures_what_the_cpu_does(mode):
    model = RecNet(4, (2, 3), (4, 5)).eval()
    for module in model.modules():
        if isinstance(module, Recurrent):
            module.mode = mode
    with torch.no_grad():
        measured = peak_live_bytes(model, torch.randn(1, 3, 16, 16))
    # Without storage, batch_norm returns two vectors of a channel each that the CPU leaves empty.
    assert measured <= getattr(profile(model, 16), f"peak_{mode}") <= 1.005 * measured


@pytest.mark.parametrize(
    ("s", "side", "batch"), [(8, 32, 1), (8, 32, 32), (16, 16, 1), (16, 16, 32), (32, 8, 1), (32, 8, 32), (16, 32, 1)]
)
def test_streaming_halves_the_memory_of_a_module(s, side, batch):
    """d = 10, e = 4, input included."""
    module = Recurrent(s, 4 * s, 10 * s, 10).to("meta").eval()
    x = torch.empty(batch, 10 * s, side, side, device="meta")
    peaks = {}
    with torch.no_grad():
        for mode in ("concat", "stream"):
            module.mode = mode
            peaks[mode] = peak_live_bytes(module, x)
    assert peaks["stream"] <= peaks["concat"] / 2


def allocations(module, x):
    """Bytes of every allocation in `module(x)`, those inside an operator too."""
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profiler:
        module(x)
    events = profiler.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


@pytest.mark.parametrize(("s", "side"), [(8, 32), (16, 16)])
def test_no_operator_makes_something_wide_for_itself(s, side):
    """PyTorch's own convolution of a single small map would gather 9·s_out channels."""
    module = Recurrent(s, 4 * s, 10 * s, 10).eval()
    x = torch.randn(1, 10 * s, side, side)
    largest = max(allocations(module, x))
    assert largest <= 4 * max(x.numel(), module.crc.weight_h.numel())
    module.mode = "concat"
    assert max(allocations(module, x)) >= 4 * 10 * 4 * s * side * side


def test_the_model_is_left_as_it_is():
    model = create_model("RecNet(2, 2, 3)").train()
    before = copy.deepcopy(model.state_dict())
    profile(model, (5, 7))
    assert model.training
    assert all(m.mode == "auto" for m in model.modules() if isinstance(m, Recurrent))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_picture_and_type_follow_the_model():
    grey = profile(create_model("RecNet(2, 2, 3)", in_channels=1), (8, 12))
    assert grey.image_size == (8, 12)
    assert grey.layers[0].out_size == (8, 12)
    half = profile(create_model("RecNet(2, 2, 3)", in_channels=1).bfloat16(), (8, 12))
    assert half.macs == grey.macs
    assert half.peak_concat < 0.6 * grey.peak_concat
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        profile(create_model("RecNet(2, 2, 3)"), 0)
    with pytest.raises(TypeError, match="image_size must be an int, got '32' of type str"):
        profile(create_model("RecNet(2, 2, 3)"), "32")


@pytest.mark.parametrize(("name", "message"), [("recnet_60_480", "4×4 pixels, got 3×9"), ("densenet_40_12", "got 3×9")])
def test_pictures_that_a_model_cannot_take(name, message):
    model = create_model(name)
    assert check_image_size(model, 8) == (8, 8)
    with pytest.raises(ValueError, match=message):
        check_image_size(model, (3, 9))


@pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")
def test_a_network_of_kernels_is_measured_without_them():
    plain, fused = (create_model("RecNet(2, 2, 3, 2, 1)", backend=backend) for backend in ("torch", "triton"))
    assert check_image_size(fused, 8) == (8, 8)
    assert count_macs(fused, 8) == count_macs(plain, 8)
    assert fused.stages[0][0].crc.backend == "triton"
