from __future__ import annotations

import itertools
import math

import pytest
import torch

from recnets.training import Recipe, learning_rate, load_recipe

PAPER = load_recipe("paper")
BOUNDS = (0, 20, 60, 120, 200)


def expected(epoch: float) -> float:
    """The paper's words: cosine cycles of 20, 40, 60 and 80 epochs, each from 0.1 down to 0."""
    start, end = next((a, b) for a, b in itertools.pairwise(BOUNDS) if a <= epoch < b)
    return 0.1 * (1 + math.cos(math.pi * (epoch - start) / (end - start))) / 2


def test_every_epoch_boundary() -> None:
    for epoch in range(200):
        assert learning_rate(PAPER, epoch) == pytest.approx(expected(epoch), abs=1e-12)
        assert learning_rate(PAPER, epoch, 781, 782) == pytest.approx(expected(epoch + 781 / 782), abs=1e-12)


@pytest.mark.parametrize("restart", [0, 20, 60, 120])
def test_restarts_are_exact(restart: int) -> None:
    assert learning_rate(PAPER, restart, 0, 782) == 0.1
    assert 0.0999 < learning_rate(PAPER, restart, 1, 782) < 0.1


@pytest.mark.parametrize("end", [20, 60, 120, 200])
def test_cycles_end_at_nothing(end: int) -> None:
    assert 0 < learning_rate(PAPER, end - 1, 781, 782) < 1e-8


def test_epoch_granularity_is_torchs_cosine() -> None:
    recipe = Recipe(epochs=12, restarts=(4,), lr=0.2, min_lr=0.01, lr_granularity="epoch")
    for start, end in ((0, 4), (4, 12)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
        reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, end - start, eta_min=0.01)
        for epoch in range(start, end):
            assert learning_rate(recipe, epoch, 3, 7) == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
            optimizer.step()
            reference.step()


def test_falls_within_every_cycle() -> None:
    rates = [learning_rate(PAPER, epoch, step, 10) for epoch in range(200) for step in range(10)]
    rises = [i for i in range(1, len(rates)) if rates[i] > rates[i - 1]]
    assert rises == [200, 600, 1200]


def test_warm_up_rises_to_the_cosine() -> None:
    recipe = Recipe(epochs=10, warmup_epochs=2, lr=0.1)
    plain = Recipe(epochs=10, lr=0.1)
    assert learning_rate(recipe, 0) == 0
    assert learning_rate(recipe, 1) == pytest.approx(0.5 * learning_rate(plain, 1))
    assert learning_rate(recipe, 0, 1, 4) == pytest.approx(0.125 * learning_rate(plain, 0, 1, 4))
    assert learning_rate(recipe, 2) == learning_rate(plain, 2)
