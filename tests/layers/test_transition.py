"""The Transition Block is a 1×1 convolution, BN and ReLU."""

import pytest
import torch
from torch import nn

from recnets.layers import TransitionBlock


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_against_modules(training, memory_format, assert_near):
    block = TransitionBlock(5, 3).double().train(training)
    modules = nn.Sequential(nn.Conv2d(5, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU()).double().train(training)
    modules.load_state_dict(dict(zip(modules.state_dict(), block.state_dict().values(), strict=True)))
    for _ in range(2):
        x = torch.randn(2, 5, 4, 3, dtype=torch.float64).to(memory_format=memory_format)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = block(ours), modules(theirs)
        assert_near(out, expected, "output")
        out.square().sum().backward()
        expected.square().sum().backward()
        assert_near(ours.grad, theirs.grad, "gradient of the input")
    for (name, own), other in zip(block.named_parameters(), modules.parameters(), strict=True):
        assert_near(own.grad, other.grad, f"gradient of {name}")
    for own, other in zip(block.buffers(), modules.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_wrong_use():
    with pytest.raises(ValueError, match="c_in must be at least 1, got 0"):
        TransitionBlock(0, 3)
    with pytest.raises(TypeError, match=r"c_out must be an int, got 3.5"):
        TransitionBlock(2, 3.5)
    with pytest.raises(ValueError, match=r"TransitionBlock\(2, 3\) expects 2 channels, got 4"):
        TransitionBlock(2, 3)(torch.zeros(1, 4, 2, 2))
