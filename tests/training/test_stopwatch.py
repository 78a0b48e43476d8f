"""What the stopwatch measures."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from recnets.data.augment import Normalise
from recnets.training.stopwatch import Stopwatch, normalise_seconds


def test_parts_of_a_step() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        watch.mark()
        time.sleep(0.002)
        watch.mark()
        time.sleep(0.004)
        watch.mark()
    fetched, whole = watch.read()
    assert 0.006 <= fetched <= whole - 0.012
    assert watch.read() == (0.0, 0.0)


def test_time_of_one_normalisation() -> None:
    def slow(images: Tensor) -> Tensor:
        time.sleep(0.002)
        return images

    assert 0.002 <= normalise_seconds(slow, torch.zeros(1), repeats=5) < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_normalisation_is_not_timed_by_its_launches() -> None:
    normalise = Normalise([0.5] * 3, [0.25] * 3, "cuda")
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8, device="cuda")

    def launched_slowly(batch: Tensor) -> Tensor:
        time.sleep(0.001)
        return normalise(batch)

    assert normalise_seconds(launched_slowly, images) > 1e-3
    assert 0 < normalise_seconds(launched_slowly, images, graph=True) < 1e-4
