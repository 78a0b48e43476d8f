"""The learning rate as a pure function of the position in the run."""

from __future__ import annotations

import bisect
import math

from recnets.training.recipe import Recipe


def learning_rate(recipe: Recipe, epoch: int, step: int = 0, steps: int = 1) -> float:
    """Learning rate of step `step` of `steps` in `epoch` (both from 0).

    Cosine cycles between 0, the restarts and the last epoch: lr at the start of each, min_lr at its end
    (reached in the limit: the first step of the next cycle is already back at lr). Position is in fractional
    epochs, or in whole ones with lr_granularity = "epoch".
    """
    position = epoch + (step / steps if recipe.lr_granularity == "step" else 0.0)
    bounds = (0, *recipe.restarts, recipe.epochs)
    cycle = min(bisect.bisect_right(bounds, position), len(bounds) - 1)
    start, end = bounds[cycle - 1], bounds[cycle]
    along = (position - start) / (end - start)
    rate = recipe.min_lr + (recipe.lr - recipe.min_lr) * 0.5 * (1 + math.cos(math.pi * along))
    if position < recipe.warmup_epochs:
        rate *= position / recipe.warmup_epochs
    return rate
