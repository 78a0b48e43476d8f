"""What the tests of the kernels share."""

from collections.abc import Callable

import pytest
from torch import Tensor


@pytest.fixture(scope="session")
def rms() -> Callable[[Tensor, Tensor], float]:
    """`rms(actual, expected)`: RMS(error)/RMS(reference); the error itself where the reference is zero."""

    def relative(actual: Tensor, expected: Tensor) -> float:
        wanted = expected.detach().double()
        error, size = (actual.detach().double() - wanted).square().mean().sqrt(), wanted.square().mean().sqrt()
        return float(error / size if size > 0 else error)

    return relative
