"""Small things to train with: four classes of coloured stripes, and a model of a few hundred weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recnets.data import DataSet, Split, channel_stats
from recnets.training import Recipe, RunOptions

TINY_MODEL = "RecNet(2, 2, 2, 2, 2)"
CLASSES = ["rows", "columns", "checks", "plain"]


def stripes(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    grid = torch.arange(8)
    rows, columns = (grid % 2)[:, None].expand(8, 8), (grid % 2)[None].expand(8, 8)
    patterns = torch.stack([rows, columns, rows ^ columns, torch.zeros(8, 8, dtype=torch.int64)])
    clean = patterns[labels][:, None].expand(-1, 3, -1, -1) * 160
    noise = torch.randint(0, 90, clean.shape, generator=generator)
    return Split((clean + noise).to(torch.uint8), labels)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def stripes_data() -> DataSet:
    train, test = stripes(70, 1), stripes(30, 2)
    mean, std = channel_stats(train.images)
    return DataSet("stripes", train, test, None, CLASSES, mean, std)


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """A recipe of 3 epochs of 5 steps (the last of 6 images), with any field changed."""

    def make(**changes: object) -> Recipe:
        values: dict[str, object] = {
            "model": TINY_MODEL, "data": "stripes", "epochs": 3, "batch_size": 16, "lr": 0.05, "pad": 1
        }  # fmt: skip
        return Recipe(**{**values, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def options() -> RunOptions:
    return RunOptions(device="cpu", check_steps=2, report=False)


@pytest.fixture
def weights_of() -> Callable[[Path], dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return lambda folder: load_file(folder / "last.safetensors")
