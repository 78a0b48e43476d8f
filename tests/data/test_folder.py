"""Folders of pictures: every mode, broken files, layouts and mistakes."""

from __future__ import annotations

import logging
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from recnets.data import load_dataset, read_picture
from recnets.data.folder import load_folder
from recnets.errors import RecNetsError
from recnets.training import RunFolder


def picture(path, colour=(200, 30, 60), size=(40, 30), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def make_folder(root, splits=("train", "val"), count=4):
    for split in splits:
        for k, name in enumerate(("ant", "bee", "cat")):
            for i in range(count):
                picture(root / split / name / f"{i}.png", (80 * k, 10 * i, 0))
    return root


def test_train_and_val(tmp_path):
    data = load_dataset(f"folder:{make_folder(tmp_path)}")
    assert data.classes == ["ant", "bee", "cat"]
    assert (data.image_size, data.in_channels, data.num_classes) == ((32, 32), 3, 3)
    assert (len(data.train), len(data.test), data.val, data.skipped) == (12, 12, None, [])
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.train.images[5, :, 0, 0].tolist() == [80, 10, 0]
    assert data.mean == pytest.approx((80 / 255, 15 / 255, 0))


def test_test_folder_is_the_test_split_and_val_the_held_out_one(tmp_path):
    make_folder(tmp_path, ("train", "test"))
    assert load_folder(tmp_path).val is None
    make_folder(tmp_path, ("val",), count=2)
    data = load_folder(tmp_path)
    assert data.val is not None
    assert (len(data.train), len(data.test), len(data.val)) == (12, 12, 6)
    with pytest.raises(ValueError, match="brings its own val images"):
        load_dataset(f"folder:{tmp_path}", val=3)


@pytest.mark.parametrize("nested", [True, False])
def test_a_split_by_seed_when_there_is_none(tmp_path, nested):
    make_folder(tmp_path, ("train",), count=10)
    path = tmp_path if nested else tmp_path / "train"
    data = load_folder(path, seed=1)
    assert (len(data.train), len(data.test)) == (24, 6)
    assert data.test.labels.bincount().tolist() == [2, 2, 2]
    assert torch.equal(load_folder(path, seed=1).test.images, data.test.images)
    others = [load_folder(path, seed=seed).test.images for seed in range(2, 6)]
    assert not all(torch.equal(other, data.test.images) for other in others)
    seen = torch.cat([data.train.images, data.test.images])[:, :, 0, 0].tolist()
    assert sorted(seen) == sorted([80 * k, 10 * i, 0] for k in range(3) for i in range(10))


def test_held_out_split(tmp_path):
    data = load_dataset(f"folder:{make_folder(tmp_path)}", val=3, image_size=8)
    assert data.val is not None
    assert (len(data.train), len(data.val), data.image_size) == (9, 3, (8, 8))


def test_every_format_and_nested_folders_but_nothing_hidden(tmp_path, caplog):
    make_folder(tmp_path)
    for name in ("a.jpg", "b.JPEG", "c.webp", "d.bmp", "deep/e.gif", "f.tiff"):
        picture(tmp_path / "train" / "ant" / name)
    for name in (".hidden.png", ".thumbs/x.png"):
        picture(tmp_path / "train" / "ant" / name)
    picture(tmp_path / "train" / ".git" / "x.png")
    (tmp_path / "train" / "ant" / ".DS_Store").write_text("x")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("x")
    (tmp_path / "train" / "list.csv").write_text("x")
    data = load_folder(tmp_path)
    assert data.train.labels.bincount().tolist() == [10, 4, 4]
    assert data.skipped == []
    assert "1 files are not pictures" in caplog.text


# One picture.


def test_grey_palette_and_bilevel(tmp_path):
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "grey.png")
    Image.fromarray(ramp).convert("P").save(tmp_path / "palette.png")
    Image.fromarray(ramp).convert("1").save(tmp_path / "one.png")
    for name in ("grey", "palette"):
        got = read_picture(tmp_path / f"{name}.png", (16, 16))
        assert torch.equal(got, torch.from_numpy(ramp).expand(3, 16, 16))
    assert set(read_picture(tmp_path / "one.png", (16, 16)).unique().tolist()) == {0, 255}


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    got = read_picture(tmp_path / "deep.png", (16, 16))
    assert torch.equal(got[0].flatten(), torch.arange(256, dtype=torch.uint8))


def test_float_grey(tmp_path):
    Image.fromarray(np.full((4, 4), 99.6, dtype=np.float32)).save(tmp_path / "f.tiff")
    assert read_picture(tmp_path / "f.tiff", (4, 4)).unique().tolist() == [100]


def test_cmyk(tmp_path):
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "c.jpg")
    red = read_picture(tmp_path / "c.jpg", (4, 4))[:, 0, 0].tolist()
    assert red[0] > 200
    assert max(red[1:]) < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path, mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    image.convert(mode).save(tmp_path / "a.png")
    got = read_picture(tmp_path / "a.png", (8, 8))
    assert got[:, :, :4].unique().tolist() == [0]
    assert got[:, :, 4:].unique().tolist() == [255]


def test_half_transparent_is_mixed(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 51)).save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png", (4, 4)).unique().tolist() == [204]


def test_exif_rotation(tmp_path):
    image = Image.new("RGB", (8, 4), "black")
    image.paste((255, 255, 255), (0, 0, 4, 4))  # the left half, lying on its side
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright: the left goes to the top
    image.save(tmp_path / "turned.png", exif=exif)
    got = read_picture(tmp_path / "turned.png", (8, 4))
    assert got[:, :4].unique().tolist() == [255]
    assert got[:, 4:].unique().tolist() == [0]


def test_size_is_height_and_width_and_antialiased(tmp_path):
    checkers = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)
    Image.fromarray(checkers).save(tmp_path / "c.png")
    got = read_picture(tmp_path / "c.png", (4, 8))
    assert got.shape == (3, 4, 8)
    assert (got.float() - 127.5).abs().max() < 10
    assert got.is_contiguous()


def test_one_channel(tmp_path):
    picture(tmp_path / "c.png", (100, 100, 100))
    got = read_picture(tmp_path / "c.png", (8, 8), channels=1)
    assert got.shape == (1, 8, 8)
    assert got.unique().tolist() == [100]
    with pytest.raises(ValueError, match="got 4"):
        read_picture(tmp_path / "c.png", (8, 8), channels=4)


# Pictures that cannot be read.


def break_some(root, count):
    for i in range(count):
        (root / "train" / "bee" / f"bad{i}.png").write_bytes(b"not a picture")


def test_bad_pictures_are_skipped_counted_and_listed(tmp_path, caplog):
    make_folder(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "train" / "ant" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "val" / "cat" / "empty.jpg").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        data = load_folder(tmp_path, max_bad=0.1)
    assert (len(data.train), len(data.test)) == (12, 12)
    assert data.train.labels.bincount().tolist() == [4, 4, 4]
    assert len(data.skipped) == 2
    assert "cut.png: " in data.skipped[0]
    assert "empty.jpg: " in data.skipped[1]
    assert "2 of 26 pictures cannot be read" in caplog.text
    assert "cut.png" in caplog.text


def test_too_many_bad_pictures_stop(tmp_path):
    make_folder(tmp_path)
    break_some(tmp_path, 1)
    with pytest.raises(RecNetsError, match=r"1 of 25 pictures cannot be read, more than max_bad = 1.00%(.|\n)*bad0"):
        load_folder(tmp_path)
    assert len(load_folder(tmp_path, max_bad=0.04).skipped) == 1  # exactly that share is allowed
    break_some(tmp_path, 20)
    with pytest.raises(RecNetsError, match=r"20 of 44 (.|\n)*…"):
        load_folder(tmp_path)


def test_a_class_that_loses_all_its_pictures(tmp_path):
    make_folder(tmp_path)
    for path in (tmp_path / "val" / "bee").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(RecNetsError, match=r"no picture of the class 'bee' in .*val can be read"):
        load_folder(tmp_path, max_bad=1)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_wrong_max_bad(tmp_path, share):
    with pytest.raises(ValueError, match="max_bad is a share from 0 to 1"):
        load_folder(tmp_path, max_bad=share)


# Layouts that are not what they should be.


def test_missing_folder(tmp_path):
    with pytest.raises(RecNetsError, match=r"no folder .*nowhere: expected PATH/train/CLASS"):
        load_dataset(f"folder:{tmp_path / 'nowhere'}")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are text")
def test_folders_whose_names_are_no_text(tmp_path):
    """Else training would end in an error when its report is written."""
    odd = os.fsdecode(b"caf\xe9")
    make_folder(tmp_path / odd)
    with pytest.raises(RecNetsError, match=r"caf\\xe9' has a name that is not UTF-8.*rename it"):
        load_folder(tmp_path / odd)
    make_folder(tmp_path / "good")
    picture(tmp_path / "good" / "train" / "ant" / f"{odd}.png")
    assert len(load_folder(tmp_path / "good").train) == 13
    picture(tmp_path / "good" / "train" / odd / "0.png")
    with pytest.raises(RecNetsError, match=r"caf\\xe9' has a name that is not UTF-8"):
        load_folder(tmp_path / "good")
    with pytest.raises(RecNetsError, match="not UTF-8"):
        RunFolder(tmp_path / odd / "run").check(resume=False)


def test_val_without_train(tmp_path):
    make_folder(tmp_path, ("val",))
    with pytest.raises(RecNetsError, match="has val but no train"):
        load_folder(tmp_path)


@pytest.mark.parametrize("classes", [0, 1])
def test_too_few_classes(tmp_path, classes):
    (tmp_path / "train").mkdir()
    if classes:
        picture(tmp_path / "train" / "ant" / "0.png")
    with pytest.raises(RecNetsError, match=f"has {classes} class folders, expected at least 2"):
        load_folder(tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_empty_class(tmp_path, split):
    make_folder(tmp_path)
    for path in (tmp_path / split / "bee").iterdir():
        path.unlink()
    with pytest.raises(RecNetsError, match=f"the class folder .*{split}.bee has no pictures"):
        load_folder(tmp_path)


def test_a_class_only_in_val(tmp_path):
    make_folder(tmp_path)
    picture(tmp_path / "val" / "dog" / "0.png")
    with pytest.raises(RecNetsError, match="has the class 'dog', which the training pictures do not have"):
        load_folder(tmp_path)


def test_a_class_missing_from_val_is_said(tmp_path, caplog):
    make_folder(tmp_path, ("train",))
    picture(tmp_path / "val" / "ant" / "0.png")
    assert len(load_folder(tmp_path).test) == 1
    assert "has no pictures of the class 'bee'" in caplog.text


def test_an_empty_val_folder(tmp_path):
    make_folder(tmp_path, ("train",))
    (tmp_path / "val").mkdir()
    with pytest.raises(RecNetsError, match="val has no pictures"):
        load_folder(tmp_path)


def test_without_pillow(tmp_path, monkeypatch):
    make_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(RecNetsError, match=r"recnets\[data\]"):
        load_folder(tmp_path)
