"""The choice of an implementation: what is asked for by name runs or raises."""

import pytest
import torch

from recnets import RecNet
from recnets.layers import CRC
from recnets.ops import dispatch

needs_no_kernels = pytest.mark.skipif(dispatch.AVAILABLE, reason="the kernels can run here")


@needs_no_kernels
def test_triton_is_refused_at_construction_where_it_cannot_run():
    with pytest.raises(ValueError, match=r"backend='triton' cannot run here: .*; use backend='auto' or 'torch'"):
        CRC(2, 3, 2, backend="triton")
    with pytest.raises(ValueError, match="backend='triton' cannot run here"):
        RecNet(2, (2,), (2,), backend="triton")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nonlinearity": "relu"}, "'relu'"),
        ({"recurrent": False}, "recurrent=False"),
        ({"padding_mode": "circular"}, "padding_mode='circular'"),
        ({"kernel_x": 5}, "kernel_x=5"),
    ],
)
def test_triton_is_refused_for_settings_without_a_kernel(options, reason):
    with pytest.raises(ValueError, match=rf"backend='triton' cannot run here: .*{reason}"):
        CRC(2, 3, 2, backend="triton", **options)


def test_auto_runs_anywhere_and_agrees_with_torch():
    auto, plain = CRC(2, 3, 2, backend="auto"), CRC(2, 3, 2, backend="torch")
    plain.load_state_dict(auto.state_dict())
    x = torch.randn(2, 4, 5, 3)
    for training in (True, False):
        assert torch.equal(auto.train(training)(x), plain.train(training)(x))
