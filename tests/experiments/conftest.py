"""Ledger entries made up for tests that are not about training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recnets.experiments.cost import cost
from recnets.experiments.runs import Run
from recnets.utils import versions


@pytest.fixture
def make_entry() -> Callable[..., dict[str, Any]]:
    """An entry of a run with a given accuracy and speed, valid by construction."""

    def make(run: Run, accuracy: float, seconds: float = 10.0, device: str = "a device") -> dict[str, Any]:
        size, epochs = cost(run.model, run.overrides, run.dataset), run.recipe.epochs
        rows = [
            {
                "epoch": e,
                "train_loss": 1 / e,
                "test_accuracy": accuracy if e == epochs else 10.0,
                "lr": 0.1,
                "images_per_second": 1000.0,
                "input_share": 0.01,
                "seconds": seconds * e,
            }
            for e in range(1, epochs + 1)
        ]
        return {
            "format": 1,
            "name": run.name,
            "model": run.model,
            "overrides": run.overrides,
            "dataset": run.dataset,
            "seed": run.seed,
            "final_accuracy": accuracy,
            "final_top5": 99.0,
            "final_loss": 0.5,
            "parameters": size.parameters,
            "macs": size.macs,
            "recipe_name": run.recipe_name,
            "recipe": run.recipe.to_dict(),
            "epochs": rows,
            "seconds": seconds * epochs,
            "images_per_second": 1000.0,
            "device": device,
            "versions": versions(),
            "commit": None,
            "command": f"recnet reproduce --only {run.name}",
            "finished": "2026-01-01 00:00:00 +0000",
            "sessions": [
                {
                    "first_epoch": 1,
                    "from_step": 0,
                    "last_epoch": epochs,
                    "started": "2026-01-01 00:00:00 +0000",
                    "device": device,
                    "commit": None,
                    "images_per_second": 1000.0,
                    "input_share": 0.01,
                    "versions": versions(),
                }
            ],
        }

    return make
