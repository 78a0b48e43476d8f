"""Splits, statistics, resizing, the embedded digits and `load_dataset` itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recnets.data import Split, base, channel_stats, default_data_dir, load_dataset, stratified_split
from recnets.errors import RecNetsError


def test_digits():
    data = load_dataset("digits")
    assert (len(data.train), len(data.test), data.val) == (1437, 360, None)
    assert (data.image_size, data.in_channels, data.num_classes) == ((8, 8), 1, 10)
    assert data.classes == [str(k) for k in range(10)]
    assert data.train.images.dtype == torch.uint8
    assert int(data.train.images.max()) == 255
    for split, low, high in ((data.train, 139, 146), (data.test, 35, 37)):
        counts = split.labels.bincount()
        assert low <= counts.min() <= counts.max() <= high


def test_digits_are_those_of_scikit_learn_each_once():
    from sklearn.datasets import load_digits

    data, bunch = load_dataset("digits"), load_digits()
    images = torch.cat([data.train.images, data.test.images]).flatten(1).double() * 16 / 255
    labels = torch.cat([data.train.labels, data.test.labels])
    ours = sorted((*map(round, row.tolist()), label) for row, label in zip(images, labels.tolist(), strict=True))
    theirs = sorted((*map(int, row), int(label)) for row, label in zip(bunch.data, bunch.target, strict=True))
    assert ours == theirs


def test_the_digits_test_split_is_fixed():
    first, second = load_dataset("digits", seed=0), load_dataset("digits", seed=1)
    assert torch.equal(first.test.images, second.test.images)
    assert first.test.labels[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]  # for good


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RecNetsError, match=r"recnets\[data\]"):
        load_dataset("digits")


def test_channel_stats_are_those_of_numpy():
    images = torch.randint(0, 256, (50, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scaled = images.numpy() / 255
    mean, std = channel_stats(images)
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-12)


def test_a_constant_channel_can_be_divided_by():
    mean, std = channel_stats(torch.full((3, 1, 2, 2), 51, dtype=torch.uint8))
    assert mean == pytest.approx((0.2,))
    assert std == (1 / 255,)


def test_digits_normalisation_is_of_the_training_part():
    data = load_dataset("digits")
    assert (data.mean, data.std) == channel_stats(data.train.images)


@pytest.mark.parametrize("count", [1, 7, 50, 99])
def test_stratified_split(count):
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[
        torch.randperm(100, generator=torch.Generator().manual_seed(0))
    ]
    rest, held = stratified_split(labels, count, seed=3)
    assert sorted(rest.tolist() + held.tolist()) == list(range(100))
    assert len(held) == count
    assert held.tolist() == sorted(held.tolist())
    for label, share in ((0, 0.5), (1, 0.3), (2, 0.2)):
        assert abs(int((labels[held] == label).sum()) - share * count) < 1


def test_stratified_split_follows_the_seed():
    labels = torch.arange(100) % 5
    again = [stratified_split(labels, 20, seed)[1].tolist() for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert again[0][:8] == [3, 5, 6, 9, 13, 14, 27, 39]  # for good: a published number depends on it


@pytest.mark.parametrize("count", [0, 10, 11])
def test_stratified_split_of_nothing_or_everything(count):
    with pytest.raises(ValueError, match=f"cannot hold {count} images out of 10"):
        stratified_split(torch.arange(10), count, 0)


def test_held_out_images_leave_the_training_set():
    whole = load_dataset("digits")
    data = load_dataset("digits", val=200, seed=1)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (1237, 200, 360)
    assert torch.equal(data.test.images, whole.test.images)
    assert (data.mean, data.std) == (whole.mean, whole.std)
    assert 19 <= data.val.labels.bincount().min() <= data.val.labels.bincount().max() <= 21
    both = torch.cat([data.train.images, data.val.images]).flatten(1)
    assert sorted(both.tolist()) == sorted(whole.train.images.flatten(1).tolist())
    again, other = load_dataset("digits", val=200, seed=1), load_dataset("digits", val=200, seed=2)
    assert torch.equal(again.val.images, data.val.images)
    assert not torch.equal(other.val.images, data.val.images)


@pytest.mark.parametrize(("val", "message"), [(-1, "val must be 0 or"), (1437, "val=1437 leaves no training image")])
def test_wrong_val(val, message):
    with pytest.raises(ValueError, match=message):
        load_dataset("digits", val=val)


def test_resize():
    data = load_dataset("digits", image_size=16, val=100)
    assert data.val is not None
    assert {split.images.shape[1:] for split in (data.train, data.test, data.val)} == {(1, 16, 16)}
    assert data.train.images.dtype == torch.uint8
    assert data.mean == channel_stats(load_dataset("digits", image_size=16).train.images)[0]
    assert base.resize(data, 16) is data


@pytest.mark.parametrize("size", [3, 5, 8, 20])
def test_resize_is_the_one_used_for_pictures(size):
    """Pillow's bilinear resize, which antialiases, within its rounding."""
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(images, torch.zeros(5, dtype=torch.int64))
    data = base.DataSet("noise", split, split, None, ["a", "b"], (0.5,), (0.5,))
    for got, image in zip(base.resize(data, size).train.images, images, strict=True):
        expected = np.asarray(Image.fromarray(image[0].numpy()).resize((size, size), Image.Resampling.BILINEAR))
        assert np.abs(got[0].numpy().astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_image_size(size, error):
    with pytest.raises(error, match="image_size must be"):
        load_dataset("digits", image_size=size)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar-10", "unknown data set 'cifar-10': expected 'digits', .*'folder:PATH'; did you mean 'cifar10'"),
        ("mnist", "unknown data set 'mnist'"),
        ("file:x", "unknown data set 'file:x'"),
        ("folder:", "folder: needs a path"),
    ],
)
def test_unknown_set(spec, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(spec)


def test_data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RECNETS_DATA", str(tmp_path / "mine"))
    assert default_data_dir() == tmp_path / "mine"
    with pytest.raises(RecNetsError, match="mine"):
        load_dataset("cifar10", download=False)
    monkeypatch.delenv("RECNETS_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_data_dir() == tmp_path / "cache" / "recnets"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_data_dir() == Path.home() / "Library" / "Caches" / "recnets"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_data_dir() == tmp_path / "local" / "recnets"


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "labels must be int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"of shape \(2,\)"),
    ],
)
def test_split_checks_what_it_holds(images, labels, message):
    with pytest.raises(ValueError, match=message):
        Split(images, labels)
