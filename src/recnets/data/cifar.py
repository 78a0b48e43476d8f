"""CIFAR-10 and CIFAR-100 from the official files, in the binary and in the python version.

Every file is checked against its md5 before it is believed: a data set is complete and right, or an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from recnets.data.base import DataSet, Split, check_labels
from recnets.data.download import DownloadError, extract, fetch, file_md5, folder_lock
from recnets.data.unpickle import load_cifar_pickle
from recnets.errors import RecNetsError

BASE_URL = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """One official version of a set: its folder, its files and the archive that holds them."""

    kind: str  # "binary" or "python"
    folder: str
    archive: str
    archive_md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str  # the file with the class names
    md5: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.names)


@dataclass(frozen=True)
class Spec:
    """A set: `labels` gives the number of classes of each label byte of a record; the last one is used."""

    name: str
    labels: tuple[int, ...]
    label_keys: tuple[bytes, ...]  # the same columns in the python version
    names_key: bytes
    train_per_file: int
    test_per_file: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layouts: tuple[Layout, ...]


CIFAR10 = Spec(
    name="cifar10",
    labels=(10,),
    label_keys=(b"labels",),
    names_key=b"label_names",
    train_per_file=10_000,
    test_per_file=10_000,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    layouts=(
        Layout(
            kind="binary",
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
            train=tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
            test=("test_batch.bin",),
            names="batches.meta.txt",
            md5={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
        ),
        Layout(
            kind="python",
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            archive_md5="c58f30108f718f92721af3b95e74349a",
            train=tuple(f"data_batch_{k}" for k in range(1, 6)),
            test=("test_batch",),
            names="batches.meta",
            md5={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
                "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
        ),
    ),
)

CIFAR100 = Spec(
    name="cifar100",
    labels=(20, 100),
    label_keys=(b"coarse_labels", b"fine_labels"),
    names_key=b"fine_label_names",
    train_per_file=50_000,
    test_per_file=10_000,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    layouts=(
        Layout(
            kind="binary",
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            archive_md5="03b5dce01913d631647c71ecec9e9cb8",
            train=("train.bin",),
            test=("test.bin",),
            names="fine_label_names.txt",
            md5={
                "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
                "test.bin": "4499cfba6c016c1be1438163640a0898",
            },
        ),
        Layout(
            kind="python",
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
            train=("train",),
            test=("test",),
            names="meta",
            md5={
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
        ),
    ),
)

SPECS = {spec.name: spec for spec in (CIFAR10, CIFAR100)}


def load_cifar(spec: Spec, root: Path, *, download: bool = True) -> DataSet:
    """Read the set from `root`, which may hold either version, unpacked or as the archive; fetch it if it holds none.

    Nothing is taken on trust: `spec` says how many images each file has and what its md5 is.
    """
    layout, folder = _locate(spec, root) or _obtain(spec, root, download)
    classes = _read_names(spec, layout, folder)
    train = _read_split(spec, layout, folder, layout.train, spec.train_per_file)
    test = _read_split(spec, layout, folder, layout.test, spec.test_per_file)
    return DataSet(spec.name, train, test, None, classes, spec.mean, spec.std)


def _locate(spec: Spec, root: Path) -> tuple[Layout, Path] | None:
    """The first version that has all its files, in `root` or being `root`."""
    for layout in spec.layouts:
        for folder in (root / layout.folder, root):
            if folder.name == layout.folder and all((folder / name).is_file() for name in layout.files):
                return layout, folder
    return None


def _obtain(spec: Spec, root: Path, download: bool) -> tuple[Layout, Path]:
    """Unpack the archive of either version if it lies in `root`, else download the binary one and unpack that."""
    wish = spec.layouts[0]
    by_hand = (
        f"put {' or '.join(layout.archive for layout in spec.layouts)} from {BASE_URL} into {root} "
        f"(or the unpacked {' or '.join(layout.folder for layout in spec.layouts)}), or name another folder "
        "with --data-dir or RECNETS_DATA"
    )
    if not download and not any((root / layout.archive).is_file() for layout in spec.layouts):
        raise RecNetsError(f"{spec.name} is not in {root}, and downloading is off: {by_hand}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with folder_lock(root):
            found = _locate(spec, root)  # another process may have brought it while this one waited
            if found is None:
                found = _unpack_archive(spec, root)
            if found is None:
                fetch(BASE_URL + wish.archive, root / wish.archive, wish.archive_md5)
                found = _unpack_archive(spec, root)
                (root / wish.archive).unlink()
    except DownloadError as error:
        raise RecNetsError(f"{error}. Without a network: {by_hand}") from error
    except OSError as error:
        raise RecNetsError(f"cannot put {spec.name} into {root}: {error.strerror or error}; {by_hand}") from error
    assert found is not None
    return found


def _unpack_archive(spec: Spec, root: Path) -> tuple[Layout, Path] | None:
    for layout in spec.layouts:
        archive = root / layout.archive
        if not archive.is_file():
            continue
        found = file_md5(archive)
        if found != layout.archive_md5:
            raise RecNetsError(
                f"{archive} has the md5 {found}, expected {layout.archive_md5}: it is truncated or corrupt; "
                "remove it to have it downloaded again"
            )
        extract(archive, layout.folder, layout.files, root)
        return layout, root / layout.folder
    return None


def _read_checked(layout: Layout, path: Path, size: int | None = None) -> bytes:
    """The file's bytes, if it has `size` of them and the right md5."""
    remedy = f"remove {path} to have it downloaded again"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecNetsError(f"cannot read {path}: {error.strerror or error}") from error
    if size is not None and len(content) != size:
        raise RecNetsError(f"{path} has {len(content):,} bytes, expected {size:,}: truncated or corrupt; {remedy}")
    expected = layout.md5.get(path.name)
    if expected is not None:
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise RecNetsError(f"{path} has the md5 {found}, expected {expected}: truncated or corrupt; {remedy}")
    return content


def _read_split(spec: Spec, layout: Layout, folder: Path, names: tuple[str, ...], count: int) -> Split:
    reader = _read_binary if layout.kind == "binary" else _read_python
    parts = [reader(spec, layout, folder / name, count) for name in names]
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _read_binary(spec: Spec, layout: Layout, path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` records of the label bytes and 3,072 pixels, channel by channel: (count, 3, 32, 32) and (count,)."""
    width = len(spec.labels) + PIXELS
    content = _read_checked(layout, path, count * width)
    records = np.frombuffer(content, dtype=np.uint8).reshape(count, width)
    for column, classes in enumerate(spec.labels):
        check_labels(records[:, column], classes, str(path))
    labels = records[:, len(spec.labels) - 1].astype(np.int64)
    return records[:, len(spec.labels) :].reshape(count, 3, 32, 32), labels


def _read_python(spec: Spec, layout: Layout, path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The same from a pickled dict with `data` (count, 3072) uint8 and one list a label column."""
    content = load_cifar_pickle(_read_checked(layout, path), str(path))
    data = content.get(b"data")
    if not isinstance(data, np.ndarray) or data.shape != (count, PIXELS):
        shape = data.shape if isinstance(data, np.ndarray) else type(data).__name__
        raise RecNetsError(f"{path}: data is {shape}, expected uint8 of shape ({count}, {PIXELS}): corrupt")
    labels = np.empty(0, dtype=np.int64)
    for key, classes in zip(spec.label_keys, spec.labels, strict=True):
        values = content.get(key)
        if not isinstance(values, list) or len(values) != count or any(type(v) is not int for v in values):
            raise RecNetsError(f"{path}: {key.decode()} is not a list of {count} labels: corrupt")
        labels = np.array(values, dtype=np.int64)
        check_labels(labels, classes, str(path))
    return np.ascontiguousarray(data).reshape(count, 3, 32, 32), labels


def _read_names(spec: Spec, layout: Layout, folder: Path) -> list[str]:
    path = folder / layout.names
    content = _read_checked(layout, path)
    if layout.kind == "binary":
        names = content.decode("utf-8", "replace").split()
    else:
        value = load_cifar_pickle(content, str(path)).get(spec.names_key)
        names = [v.decode("utf-8", "replace") for v in value if type(v) is bytes] if type(value) is list else []
    if len(set(names)) != spec.labels[-1] or len(names) != spec.labels[-1]:
        raise RecNetsError(f"{path} names {len(set(names))} classes, expected {spec.labels[-1]}: corrupt")
    return names
