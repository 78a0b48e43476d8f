"""Weights find their data again: what their metadata say, split and sized as in training."""

from __future__ import annotations

import pytest
import torch

from recnets.data import data_of, load_dataset, normalisation_of, spec_of
from recnets.errors import RecNetsError

pytest.importorskip("PIL", reason="pictures need the extra 'data'")


@pytest.fixture
def folder(tmp_path):
    """Ten pictures of two classes, each of its own grey."""
    from PIL import Image

    for i in range(20):
        place = tmp_path / ("cat" if i % 2 else "dog")
        place.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (10 * i,) * 3).save(place / f"{i:02}.png")
    return f"folder:{tmp_path}"


def test_a_folder_is_split_and_sized_as_in_training(folder):
    metadata = {"recipe": {"data": folder, "split_seed": 3}, "image_size": [8, 8], "classes": ["cat", "dog"]}
    found, trained = data_of(metadata), load_dataset(folder, image_size=8, seed=3)
    assert found.image_size == (8, 8)
    assert torch.equal(found.test.images, trained.test.images)
    other = load_dataset(folder, image_size=8, seed=0)
    assert not torch.equal(found.test.images, other.test.images)  # some of these were trained on


def test_images_that_were_held_out_are_no_training_images(folder, tmp_path):
    metadata = {"recipe": {"data": folder, "split_seed": 3, "val": 4}}
    found, trained = data_of(metadata), load_dataset(folder, val=4, seed=3)
    assert torch.equal(found.train.images, trained.train.images)
    assert len(found.train) == 12
    assert len(data_of(metadata, f"folder:{tmp_path}/.").train) == 16  # other data are taken whole


def test_one_side_will_do_and_two_must_be_the_same(folder):
    """As in predict; an oblong picture made square would be evaluated without a word."""
    assert data_of({"dataset": folder, "image_size": 8}).image_size == (8, 8)
    with pytest.raises(RecNetsError, match="trained on pictures of 8×12, and the data sets here are square"):
        data_of({"dataset": folder, "image_size": [8, 12]})


def test_what_is_given_wins(folder):
    assert spec_of({"recipe": {"data": "cifar10"}, "dataset": "cifar100"}) == "cifar10"
    assert spec_of({"dataset": "cifar100"}) == "cifar100"
    assert spec_of({"recipe": {"data": "cifar10"}}, folder) == folder


def test_errors_say_what_to_give(folder):
    with pytest.raises(RecNetsError, match="give --data"):
        data_of({})
    with pytest.raises(RecNetsError, match=r"trained on 3 classes of cifar3, .* has 2 of its own"):
        data_of({"dataset": "cifar3", "classes": ["a", "b", "c"]}, folder)
    with pytest.raises(RecNetsError, match="how pictures are normalised"):
        normalisation_of({})
    with pytest.raises(RecNetsError, match="expect images of 1 channels"):
        normalisation_of({"normalisation": {"mean": [0.5], "std": [0.2]}}, load_dataset(folder))


def test_normalisation_is_the_weights_own_else_the_data_sets(folder):
    data = load_dataset(folder)
    own = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0]}
    assert normalisation_of({"normalisation": own}, data) == (own["mean"], own["std"])
    assert normalisation_of({}, data) == (list(data.mean), list(data.std))
