"""Initial weights that a recipe asks for."""

from collections.abc import Callable

import pytest
import torch

from recnets.data import DataSet
from recnets.training import Recipe, RunOptions
from recnets.training.session import build_model

Make = Callable[..., Recipe]


def test_initial_weights_by_torchs_defaults(stripes_data: DataSet, make_recipe: Make, options: RunOptions) -> None:
    """Smaller by a factor of √6 than He's, each kernel by its own fan-in, and uniform: none beyond √3 deviations."""
    recipes = [make_recipe(model="recnet_60_480", init=init) for init in ("model", "torch")]
    own, torchs = (build_model(recipe, options, stripes_data).state_dict() for recipe in recipes)
    kernels = [name for name, value in own.items() if value.ndim == 4]
    assert len(kernels) == 1 + 6 * 3  # the stem; W_x, W_h and the transition of each module
    for name in kernels:
        assert float(torchs[name].abs().max()) <= own[name][0].numel() ** -0.5
        assert float(own[name].square().mean() / torchs[name].square().mean()) == pytest.approx(6, rel=0.2)


def test_initial_weights_of_the_papers_year(stripes_data: DataSet, make_recipe: Make, options: RunOptions) -> None:
    """PyTorch 1.1 drew BN's weights from 0 to 1; all else is as today."""
    recipes = [make_recipe(model="recnet_60_480", init=init) for init in ("torch", "torch-1.1")]
    todays, then = (build_model(recipe, options, stripes_data).state_dict() for recipe in recipes)
    norms = [name for name in todays if name.endswith("norm.weight")]
    assert len(norms) == 1 + 6 * 2
    for name in norms:
        assert (todays[name] == 1).all()
        assert 0 <= float(then[name].min()) <= 0.2
        assert 0.8 <= float(then[name].max()) <= 1
        assert float(then[name].mean()) == pytest.approx(0.5, abs=0.2)
    for name in todays.keys() - norms:
        assert todays[name].shape == then[name].shape
        if todays[name].is_floating_point() and todays[name].ndim < 2:  # biases and statistics
            assert name.endswith("classifier.bias") or torch.equal(todays[name], then[name])
