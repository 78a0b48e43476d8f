"""BN's statistics as averages over training images."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recnets.data import DataSet
from recnets.layers import CRC
from recnets.models import create_model, load_weights
from recnets.training import Recipe, RunOptions, train
from recnets.training.statistics import with_new_statistics

Make = Callable[..., Recipe]


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_statistics_are_those_of_the_batches(momentum: float | None) -> None:
    torch.manual_seed(0)
    model = create_model("RecNet(1, 4, 4, 2, 2)", head="hidden")
    before = copy.deepcopy(model.state_dict())
    batches = list(torch.randn(2, 6, 3, 8, 8))
    new = with_new_statistics(model, batches, momentum)
    stem = new.stem
    means = [stem.conv(inputs).mean((0, 2, 3)) for inputs in batches]  # type: ignore[operator, union-attr]
    expected = (means[0] + means[1]) / 2 if momentum is None else means[0] / 4 + means[1] / 2
    torch.testing.assert_close(stem.norm.running_mean, expected)  # type: ignore[union-attr]
    assert not new.training
    assert int(new.classifier[1].num_batches_tracked) == 2  # type: ignore[index, arg-type]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])  # the network itself stays as it was


def test_a_run_tells_its_accuracy_with_averages_and_keeps_its_weights(
    stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    def run(name: str, count: int) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        asked = dataclasses.replace(options, average_batches=count)
        folder = train(make_recipe(epochs=6), out=tmp_path / name, data=stripes_data, options=asked).folder
        return json.loads((folder / "summary.json").read_text()), load_weights(folder)[0].state_dict()

    (plain, weights), (averaged, same) = run("plain", 0), run("averaged", 100)
    assert "averaged_accuracy" not in plain
    assert averaged["final_accuracy"] == plain["final_accuracy"]
    accuracy = averaged["averaged_accuracy"]
    assert isinstance(accuracy, float)
    assert accuracy >= 50  # of four classes: it is a trained network's
    for name, value in weights.items():
        assert torch.equal(value, same[name])


def test_norms_that_all_steps_share_have_no_averages(
    stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    recipe = make_recipe(epochs=1, model_options={"nonlinearity": "shared_bn_relu"})
    asked = dataclasses.replace(options, average_batches=2)
    result = train(recipe, out=tmp_path / "run", data=stripes_data, options=asked)
    assert result.summary is not None
    assert result.summary["averaged_accuracy"] is None


def test_layers_of_other_kinds_have_them() -> None:
    for nonlinearity in ("relu", "linear", "separate_bn_relu"):
        layer = nn.Sequential(CRC(2, 4, 2, nonlinearity=nonlinearity), nn.BatchNorm2d(8))
        new = with_new_statistics(layer, [torch.randn(4, 4, 5, 5) for _ in range(3)])
        assert int(new[1].num_batches_tracked) == 3
