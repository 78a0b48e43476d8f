from __future__ import annotations

import dataclasses
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recnets.data import DataSet
from recnets.errors import RecNetsError
from recnets.training import Recipe, RunOptions, train
from recnets.training.checkpoint import fingerprint, load_checkpoint, save_checkpoint


@pytest.fixture
def stopped_run(tmp_path: Path, stripes_data: DataSet, make_recipe: Callable[..., Recipe], options: RunOptions) -> Path:
    """A run that has done 1 epoch of 3."""
    first = dataclasses.replace(options, epochs_until=1)
    return train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=first).folder


def resume(folder: Path, recipe: Recipe, data: DataSet, options: RunOptions) -> None:
    train(recipe, out=folder, resume=True, data=data, options=options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "RecNet(2, 2, 2, 1, 2)"}, "model: 'RecNet.2, 2, 2, 2, 2.' -> 'RecNet.2, 2, 2, 1, 2.'"),
        ({"data": "cifar10"}, "data: 'stripes' -> 'cifar10'"),
        ({"lr": 0.5, "seed": 2}, "seed: 0 -> 2; lr: 0.05 -> 0.5"),
    ],
)
def test_other_settings_are_refused(
    stopped_run: Path,
    stripes_data: DataSet,
    make_recipe: Callable[..., Recipe],
    options: RunOptions,
    changes: dict[str, object],
    words: str,
) -> None:
    before = {p.name: p.read_bytes() for p in stopped_run.iterdir()}
    with pytest.raises(RecNetsError, match=f"cannot resume .*{words}"):
        resume(stopped_run, make_recipe(**changes), stripes_data, options)
    assert {p.name: p.read_bytes() for p in stopped_run.iterdir()} == before


def test_other_images_are_refused(
    stopped_run: Path, stripes_data: DataSet, make_recipe: Callable[..., Recipe], options: RunOptions
) -> None:
    images = stripes_data.train.images.clone()
    images[3, 0, 0, 0] ^= 1
    other = dataclasses.replace(stripes_data, train=dataclasses.replace(stripes_data.train, images=images))
    assert fingerprint(other) != fingerprint(stripes_data)
    with pytest.raises(RecNetsError, match="training images of stripes are not those"):
        resume(stopped_run, make_recipe(), other, options)


def test_missing_and_extra_tensors_are_named(
    stopped_run: Path, stripes_data: DataSet, make_recipe: Callable[..., Recipe], options: RunOptions
) -> None:
    path = stopped_run / "checkpoint.pt"
    content = load_checkpoint(path)
    content["model"]["surplus"] = content["model"].pop("stem.conv.weight")
    save_checkpoint(path, content)
    with pytest.raises(RecNetsError, match=r"1 tensors missing \(stem.conv.weight\), 1 unknown \(surplus\)"):
        resume(stopped_run, make_recipe(), stripes_data, options)


def test_wrong_shapes_are_named(
    stopped_run: Path, stripes_data: DataSet, make_recipe: Callable[..., Recipe], options: RunOptions
) -> None:
    path = stopped_run / "checkpoint.pt"
    content = load_checkpoint(path)
    content["model"]["stem.conv.weight"] = torch.zeros(1)
    save_checkpoint(path, content)
    with pytest.raises(RecNetsError, match=r"stem.conv.weight has shape \(1,\), expected \(4, 3, 3, 3\)"):
        resume(stopped_run, make_recipe(), stripes_data, options)


@pytest.mark.parametrize("damage", ["cut", "text", "foreign"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "checkpoint.pt"
    if damage == "foreign":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        save_checkpoint(path, {"format": 1, "x": torch.zeros(1000)})
        path.write_bytes(path.read_bytes()[:700] if damage == "cut" else b"hello")
    with pytest.raises(RecNetsError, match="checkpoint"):
        load_checkpoint(path)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("evil-was-here",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_checkpoint_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 1, "x": Evil()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(RecNetsError, match="not a readable checkpoint"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only file system")])
def test_full_or_read_only_disk_keeps_the_old_checkpoint(
    stopped_run: Path,
    stripes_data: DataSet,
    make_recipe: Callable[..., Recipe],
    options: RunOptions,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
) -> None:
    old = (stopped_run / "checkpoint.pt").read_bytes()

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync" if number == errno.ENOSPC else "open", refuse)
        with pytest.raises(RecNetsError, match=f"cannot write .*{words}"):
            resume(stopped_run, make_recipe(), stripes_data, options)
    assert (stopped_run / "checkpoint.pt").read_bytes() == old
    assert not list(stopped_run.glob(".*.tmp"))
    resume(stopped_run, make_recipe(), stripes_data, options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ENOSPC of the kernel, in the middle of the write."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"format": 1, "x": torch.zeros(3)})
    write = Path.write_bytes

    def to_full_device(self: Path, content: bytes) -> int:
        return write(Path("/dev/full"), content)

    monkeypatch.setattr(Path, "write_bytes", to_full_device)
    with pytest.raises(RecNetsError, match="No space left"):
        save_checkpoint(path, {"format": 1, "x": torch.ones(3)})
    assert torch.equal(load_checkpoint(path)["x"], torch.zeros(3))


def test_the_scale_of_the_loss_is_kept(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Callable[..., Recipe], options: RunOptions
) -> None:
    recipe, folder = make_recipe(precision="fp16"), tmp_path / "run"
    train(recipe, out=folder, data=stripes_data, options=dataclasses.replace(options, epochs_until=1))
    path = folder / "checkpoint.pt"
    content = load_checkpoint(path)
    assert content["scaler"]["scale"] == 2.0**16
    steps = content["scaler"]["_growth_tracker"]
    assert steps > 0
    content["scaler"]["scale"] = 512.0
    save_checkpoint(path, content)
    resume(folder, recipe, stripes_data, options)
    ended = load_checkpoint(path)["scaler"]
    assert (ended["scale"], ended["_growth_tracker"]) == (512.0, 3 * steps)
