"""What a data set is here: uint8 images and int64 labels in memory, and how one is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recnets.errors import RecNetsError


@dataclass(frozen=True)
class Split:
    """`images`: uint8 (N, C, H, W); `labels`: int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                "images must be uint8 of shape (N, C, H, W), got "
                f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.images)},), got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        """The images at `indices` (int64), in that order."""
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    """A data set in memory. `mean` and `std` are per channel, of the training images scaled to [0, 1].

    `val` is a part held out of the training images, for choosing; `test` is only ever evaluated. `skipped`
    lists pictures that could not be read, each with the reason.
    """

    name: str
    train: Split
    test: Split
    val: Split | None
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: list[str] = field(default_factory=list)

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W)"""
        return self.train.images.shape[2], self.train.images.shape[3]

    @property
    def in_channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def channel_stats(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and (population) standard deviation of uint8 (N, C, H, W) images scaled to [0, 1].

    From a histogram of the 256 values, so exact in double precision whatever the number of images. A channel
    that hardly varies gets the standard deviation of one grey level, so that dividing by it is safe.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).to(torch.float64)
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        means.append(mean)
        stds.append(max(variance**0.5, 1 / 255))
    return tuple(means), tuple(stds)


def stratified_split(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (rest, held out) with exactly `count` held out, classes in proportion; both ascending.

    The proportional shares are rounded down and what is missing goes to the largest remainders.
    """
    total = len(labels)
    if not 0 < count < total:
        raise ValueError(f"cannot hold {count} images out of {total}: it must be at least 1 and less than {total}")
    # RandomState's streams are frozen by numpy's policy: a split stays the same for every later version.
    random = np.random.RandomState(seed)
    array = labels.cpu().numpy()
    classes, counts = np.unique(array, return_counts=True)
    shares = counts * count // total
    by_remainder = np.argsort(-(counts * count % total), kind="stable")
    shares[by_remainder[: count - shares.sum()]] += 1
    held = np.concatenate(
        [
            random.permutation(np.flatnonzero(array == label))[:share]
            for label, share in zip(classes, shares, strict=True)
        ]
    )
    mask = np.zeros(total, dtype=bool)
    mask[held] = True
    return torch.from_numpy(np.flatnonzero(~mask)), torch.from_numpy(np.flatnonzero(mask))


def hold_out(data: DataSet, count: int, seed: int) -> DataSet:
    """Move `count` training images into `val`. The mean and std stay those of the whole training set."""
    if count < 0:
        raise ValueError(f"val must be 0 or the number of training images to hold out, got {count}")
    if count == 0:
        return data
    if data.val is not None:
        raise ValueError(f"{data.name} brings its own val images, so val={count} would be a second set: use val=0")
    if count >= len(data.train):
        raise ValueError(f"val={count} leaves no training image: {data.name} has {len(data.train)}")
    rest, held = stratified_split(data.train.labels, count, seed)
    return replace(data, train=data.train.take(rest), val=data.train.take(held))


def resize(data: DataSet, size: int) -> DataSet:
    """The same data set at size × size pixels (bilinear, antialiased); mean and std are measured anew."""
    if data.image_size == (size, size):
        return data

    def resized(split: Split) -> Split:
        chunks = [
            functional.interpolate(chunk.float(), size=(size, size), mode="bilinear", antialias=True)
            .round_()
            .clamp_(0, 255)
            .to(torch.uint8)
            for chunk in split.images.split(1000)  # the float copy is four times the size
        ]
        return Split(torch.cat(chunks), split.labels)

    train = resized(data.train)
    mean, std = channel_stats(train.images)
    val = None if data.val is None else resized(data.val)
    return replace(data, train=train, test=resized(data.test), val=val, mean=mean, std=std)


def check_labels(labels: Tensor | np.ndarray, classes: int | Sequence[str], where: str) -> None:
    """A RecNetsError unless every label names a class."""
    number = classes if isinstance(classes, int) else len(classes)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= number:
        wrong = low if low < 0 else high
        raise RecNetsError(f"{where} holds the label {wrong}, expected 0 to {number - 1}: the file is corrupt")
