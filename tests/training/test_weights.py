"""Runs that start from trained weights."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recnets.cli.train import parse, starting_recipe
from recnets.data import DataSet, Split
from recnets.errors import Misuse, RecNetsError
from recnets.models import load_weights, save_weights
from recnets.training import Recipe, RunOptions, TrainResult, load_recipe, train
from recnets.training.session import build_model, load_initial

Make = Callable[..., Recipe]
TRAINED = "RecNet(2, 2, 2, 2, 2)"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, stripes_data: DataSet) -> Path:
    """The folder of a run that knows the stripes."""
    recipe = Recipe(model=TRAINED, data="stripes", epochs=8, batch_size=16, lr=0.05, pad=1)
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
    assert load_initial(model, str(trained), stripes_data) == f"from {trained}"
    theirs = load_weights(trained)[0].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert not torch.equal(before["classifier.weight"], theirs["classifier.weight"])


def test_other_classes_get_a_classifier_of_their_own(
    trained: Path, other_classes: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    model = build_model(make_recipe(), options, other_classes)
    classifier = {name: value.clone() for name, value in model.classifier.state_dict().items()}
    assert load_initial(model, str(trained), other_classes) == f"from {trained}, with a new classifier"
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


def test_what_a_recipe_does_not_say_is_as_the_weights_were_trained(
    tmp_path: Path, trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    recipe = load_recipe("finetune", weights=Path("recnet_60_480.cifar100"))
    assert (recipe.model, recipe.model_options, recipe.image_size) == ("recnet_60_480", {}, 32)
    assert (recipe.weights, recipe.data) == ("recnet_60_480.cifar100", "cifar100")
    recipe = load_recipe("finetune", weights="recnet_60_480.cifar100", image_size=48, data="folder:pictures")
    assert (recipe.image_size, recipe.data) == (48, "folder:pictures")
    hidden, weights = make_recipe(model_options={"head": "hidden"}), str(tmp_path / "w.safetensors")
    save_weights(weights, build_model(hidden, options, stripes_data), {"image_size": [24, 16]})
    recipe = load_recipe("paper", weights=weights)
    assert (recipe.model, recipe.model_options) == (hidden.model, {"head": "hidden"})
    assert recipe.image_size is None  # the data sets' pictures are square, those were not
    # Options are laid over the weights' own, those of another model are not.
    assert load_recipe("paper", weights=weights, model_options={"mode": "stream"}).model_options == {
        "head": "hidden",
        "mode": "stream",
    }
    assert load_recipe("paper", weights=weights, model="recnet_60_480").model_options == {}


def test_only_who_names_the_weights_names_another_model(trained: Path, tmp_path: Path) -> None:
    assert load_recipe("quick").model != TRAINED
    recipe = load_recipe("quick", weights=str(trained))
    assert (recipe.model, recipe.data) == (TRAINED, "digits")  # the data are the recipe's
    file = tmp_path / "mine.toml"
    file.write_text(f'weights = "{trained}"\ndata = "folder:pictures"\n')
    assert load_recipe(file).model == TRAINED
    file.write_text(file.read_text() + 'model = "recnet_60_480"\n')
    assert load_recipe(file).model == "recnet_60_480"
    assert load_recipe(file, weights=str(trained)).model == TRAINED
    assert load_recipe(file, weights=None).weights is None


def test_the_command_line_fine_tunes() -> None:
    recipe = starting_recipe(["--weights=recnet_60_480.cifar100", "--data", "digits"])
    assert recipe == load_recipe("finetune", weights="recnet_60_480.cifar100")
    assert recipe.lr < load_recipe("paper").lr
    assert starting_recipe(["--weights", "recnet_60_480.cifar100", "--recipe", "paper"]).epochs == 200
    assert starting_recipe(["--weights", "None"]) == load_recipe("quick")
    assert parse(["--weights", "None"], "recnet train").__self__.settings.weights is None  # type: ignore[attr-defined]


def test_options_on_the_command_line_are_laid_over_the_weights_own(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    own = {"head": "hidden", "kernel_x": 1}
    path = str(tmp_path / "w.safetensors")
    save_weights(path, build_model(make_recipe(model_options=own), options, stripes_data), {})

    def given(*words: str) -> dict[str, object]:
        train = parse(["--weights", path, *words], "recnet train").__self__  # type: ignore[attr-defined]
        return dict(train.settings.model_options)

    assert given() == own
    assert given("--model-options", "padding_mode=circular") == {**own, "padding_mode": "circular"}
    assert given("--model", "recnet_60_480", "--model-options", "e=2") == {"e": 2}


def test_weights_that_are_not_there_or_do_not_fit_are_clear_errors(
    trained: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, tmp_path: Path
) -> None:
    with pytest.raises(RecNetsError, match=r"'recnet_60_48\.cifar100' is neither .*did you mean"):
        load_recipe("finetune", weights="recnet_60_48.cifar100")
    other = make_recipe(model="RecNet(2, 2, 2, 1, 2)", weights=str(trained))
    words = (
        r"are of RecNet\(2, 2, 2, 2, 2\), and do not fit the RecNet\(2, 2, 2, 1, 2\) .*name no model beside weights$"
    )
    with pytest.raises(Misuse, match=words):
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
    with pytest.raises(Misuse, match="are for pictures of 3 channels, those of stripes have 1 channel"):
        train(make_recipe(weights=str(trained)), out=tmp_path / "run", data=grey, options=options)
    other = make_recipe(model_options={"head": "hidden", "kernel_h": 1}, weights=str(trained))
    with pytest.raises(Misuse, match=r"beside weights; .* has the wrong shape for stages\.0\.0\.crc\.weight_h"):
        train(other, out=tmp_path / "run", data=stripes_data, options=options)
    assert not (tmp_path / "run").exists()
