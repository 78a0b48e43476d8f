"""What the tests of the kernels share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .emulator import COMPILER, Emulator


@pytest.fixture(scope="session")
def rms() -> Callable[[Tensor, Tensor], float]:
    """`rms(actual, expected)`: RMS(error)/RMS(reference); the error itself where the reference is zero."""

    def relative(actual: Tensor, expected: Tensor) -> float:
        wanted = expected.detach().double()
        error, size = (actual.detach().double() - wanted).square().mean().sqrt(), wanted.square().mean().sqrt()
        return float(error / size if size > 0 else error)

    return relative


@pytest.fixture
def emulated(monkeypatch) -> Callable[..., Emulator]:
    """`emulated(multiprocessors=4)`: until the test ends CUDA kernels run on the CPU, for tensors there."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the CUDA kernels themselves are tested")
    if COMPILER is None:
        pytest.skip("the CUDA kernels are emulated by way of g++, which was not found")

    def start(multiprocessors: int = 4, **options) -> Emulator:
        device = Emulator(multiprocessors, **options)
        device.replace_the_device(monkeypatch)
        return device

    return start
