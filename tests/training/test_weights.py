"""Runs that start from trained weights."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recnets.cli.train import starting_recipe
from recnets.data import DataSet, Split
from recnets.errors import Misuse, RecNetsError
from recnets.models import load_weights, save_weights
from recnets.training import Recipe, RunOptions, TrainResult, load_recipe, train
from recnets.training.session import build_model, load_initial

Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, stripes_data: DataSet) -> Path:
    """The folder of a run that knows the stripes."""
    recipe = Recipe(model="RecNet(2, 2, 2, 2, 2)", data="stripes", epochs=8, batch_size=16, lr=0.05, pad=1)
    folder = tmp_path_factory.mktemp("runs") / "first"
    return train(recipe, out=folder, data=stripes_data, options=RunOptions(device="cpu", report=False)).folder


@pytest.fixture
def other_classes(stripes_data: DataSet) -> DataSet:
    """The same pictures, but only "plain" or not is asked."""

    def asked(split: object) -> object:
        return dataclasses.replace(split, labels=(split.labels == 3).long())  # type: ignore[type-var, attr-defined]

    sides = {name: asked(getattr(stripes_data, name)) for name in ("train", "test")}
    return dataclasses.replace(stripes_data, name="plainness", classes=["lines", "plain"], **sides)  # type: ignore[arg-type]


def test_the_same_classes_go_on_where_the_weights_stand(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    model = build_model(make_recipe(seed=5), options, stripes_data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_initial(model, str(trained), stripes_data)
    theirs = load_weights(trained)[0].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert not torch.equal(before["classifier.weight"], theirs["classifier.weight"])


def test_other_classes_get_a_classifier_of_their_own(
    trained: Path, other_classes: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    model = build_model(make_recipe(), options, other_classes)
    classifier = {name: value.clone() for name, value in model.classifier.state_dict().items()}
    load_initial(model, str(trained), other_classes)
    theirs = load_weights(trained)[0].state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith("classifier."):
            assert torch.equal(value, theirs[name]), name
    for name, value in model.classifier.state_dict().items():
        assert torch.equal(value, classifier[name])


def test_a_run_goes_on_where_the_weights_stand_and_says_so(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    def first_loss(name: str, **changes: object) -> float:
        recipe = make_recipe(epochs=1, lr=0.01, **changes)
        return float(train(recipe, out=tmp_path / name, data=stripes_data, options=options).history[0]["train_loss"])

    assert first_loss("from weights", weights=str(trained)) < 0.8 * first_loss("from nothing")
    assert load_weights(tmp_path / "from weights")[1]["recipe"]["weights"] == str(trained)


def test_the_average_of_weights_starts_from_them_too(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    recipe = make_recipe(weights=str(trained), ema=0.999, lr=1e-6, epochs=1)
    result = train(recipe, out=tmp_path / "run", data=stripes_data, options=options)
    theirs = load_weights(trained)[0].state_dict()["stages.0.0.crc.weight_h"]
    torch.testing.assert_close(
        load_weights(result.folder)[0].state_dict()["stages.0.0.crc.weight_h"], theirs, atol=1e-4, rtol=0
    )


def test_a_resumed_run_needs_the_weights_no_more(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    source = shutil.copytree(trained, tmp_path / "source")
    recipe = make_recipe(weights=str(source))

    def run(name: str, **changes: object) -> TrainResult:
        asked = dataclasses.replace(options, **changes)
        return train(recipe, out=tmp_path / name, resume=True, data=stripes_data, options=asked)

    whole = run("whole")
    run("halves", epochs_until=1)
    shutil.rmtree(source)
    assert run("halves").history[-1]["train_loss"] == whole.history[-1]["train_loss"]


def test_weights_name_the_model_and_the_size_of_pictures(
    tmp_path: Path, trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    recipe = load_recipe("finetune", weights="recnet_60_480.cifar100", data="folder:pictures")
    assert (recipe.model, recipe.model_options, recipe.image_size) == ("recnet_60_480", {}, 32)
    assert load_recipe("finetune", weights="recnet_60_480.cifar100", image_size=48).image_size == 48
    hidden = make_recipe(model_options={"head": "hidden"})
    save_weights(tmp_path / "w.safetensors", build_model(hidden, options, stripes_data), {"image_size": [24, 16]})
    recipe = load_recipe("paper", weights=str(tmp_path / "w.safetensors"))
    assert (recipe.model, recipe.model_options) == (hidden.model, {"head": "hidden"})
    assert recipe.image_size is None  # the data sets' pictures are square, those were not
    assert load_recipe("quick", weights=str(trained)).model == load_recipe("quick").model  # which names one


def test_the_command_line_fine_tunes() -> None:
    recipe = starting_recipe(["--weights=recnet_60_480.cifar100", "--data", "digits"])
    assert recipe == load_recipe("finetune", weights="recnet_60_480.cifar100")
    assert recipe.lr < load_recipe("paper").lr
    assert starting_recipe(["--weights", "recnet_60_480.cifar100", "--recipe", "paper"]).epochs == 200


def test_weights_that_are_not_there_or_do_not_fit_are_clear_errors(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    with pytest.raises(RecNetsError, match=r"'recnet_60_48\.cifar100' is neither .*did you mean"):
        load_recipe("finetune", weights="recnet_60_48.cifar100")
    other = make_recipe(model="RecNet(2, 2, 2, 1, 2)", weights=str(trained))
    with pytest.raises(Misuse, match=r"are of RecNet\(2, 2, 2, 2, 2\), and do not fit .* leave --model"):
        train(other, out=tmp_path / "run", data=stripes_data, options=options)
    grey = dataclasses.replace(
        stripes_data,
        **{
            name: Split(getattr(stripes_data, name).images[:, :1], getattr(stripes_data, name).labels)
            for name in ("train", "test")
        },
        mean=stripes_data.mean[:1],
        std=stripes_data.std[:1],
    )
    with pytest.raises(Misuse, match="are for pictures of 3 channels, those of stripes have 1"):
        train(make_recipe(weights=str(trained)), out=tmp_path / "run", data=grey, options=options)
    assert not (tmp_path / "run").exists()
