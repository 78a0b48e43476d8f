"""The readers of the official CIFAR layouts, on tiny files of the same form."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle

import numpy as np
import pytest
import torch

from recnets.data import cifar, load_dataset
from recnets.data.cifar import CIFAR10, CIFAR100, load_cifar
from recnets.errors import RecNetsError


def check(data, fake):
    train = np.concatenate([images for images, _ in fake.parts[:-1]]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([columns[-1] for _, columns in fake.parts[:-1]])
    assert torch.equal(data.train.images, torch.from_numpy(train))
    assert data.train.labels.tolist() == labels.tolist()
    assert torch.equal(data.test.images, torch.from_numpy(fake.parts[-1][0].reshape(-1, 3, 32, 32)))
    assert data.test.labels.tolist() == fake.parts[-1][1][-1].tolist()
    assert data.classes == [name.decode() for name in fake.names]
    assert data.val is None
    assert (data.name, data.image_size, data.in_channels) == (fake.spec.name, (32, 32), 3)
    assert data.num_classes == fake.spec.labels[-1]


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_reads_the_layout(fake, tmp_path, layout):
    folder = getattr(fake, f"write_{layout}")(tmp_path)
    check(load_cifar(fake.spec, tmp_path, download=False), fake)
    check(load_cifar(fake.spec, folder, download=False), fake)  # the folder itself may be named


def test_images_are_writable_memory(fake10, tmp_path):
    fake10.write_python(tmp_path)
    data = load_cifar(fake10.spec, tmp_path, download=False)
    data.train.images[0, 0, 0, 0] = 7
    assert data.train.images[0, 0, 0, 0] == 7


def test_only_the_true_sizes_are_accepted_by_default(fake, tmp_path):
    fake.write_binary(tmp_path)
    with pytest.raises(RecNetsError, match=r"bytes, expected (30,730,000|153,700,000): truncated or corrupt"):
        load_dataset(fake.spec.name, data_dir=tmp_path, download=False)


def test_python_files_are_checked_by_md5_by_default(fake, tmp_path):
    fake.write_python(tmp_path)
    with pytest.raises(RecNetsError, match=r"has the md5 .*, expected .*: truncated or corrupt"):
        load_dataset(fake.spec.name, data_dir=tmp_path, download=False)


def test_specs_have_an_md5_for_every_file_with_images():
    for spec, total in ((CIFAR10, 5 * 10_000), (CIFAR100, 50_000)):
        for layout in spec.layouts:
            assert set(layout.train) | set(layout.test) <= set(layout.md5)
            assert len(layout.train) * spec.train_per_file == total
            assert len(layout.test) * spec.test_per_file == 10_000


def test_writer_reproduces_an_official_file(write_pickle2, tmp_path):
    """The md5 of CIFAR-10's batches.meta: the fakes are in the format of the real files, and this one is read."""
    names = b"airplane automobile bird cat deer dog frog horse ship truck".split()
    content = write_pickle2({b"num_cases_per_batch": 10000, b"label_names": names, b"num_vis": 3072})
    layout = CIFAR10.layouts[1]
    assert hashlib.md5(content).hexdigest() == layout.md5["batches.meta"]
    (tmp_path / "batches.meta").write_bytes(content)
    assert cifar._read_names(CIFAR10, layout, tmp_path) == [name.decode() for name in names]


@pytest.mark.parametrize("change", [-1, 1, -3073])
def test_wrong_size_is_an_error(fake, tmp_path, change):
    path = fake.write_binary(tmp_path) / fake.binary.train[-1]
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(RecNetsError, match=r"expected .* truncated or corrupt; remove"):
        load_cifar(fake.spec, tmp_path, download=False)


def test_a_flipped_bit_is_an_error(fake10, tmp_path):
    folder = fake10.write_binary(tmp_path)
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in fake10.binary.files}
    layout = dataclasses.replace(fake10.binary, md5=md5)
    spec = dataclasses.replace(fake10.spec, layouts=(layout,))
    load_cifar(spec, tmp_path, download=False)
    content = bytearray((folder / "test_batch.bin").read_bytes())
    content[1000] ^= 1
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(RecNetsError, match=r"test_batch\.bin has the md5"):
        load_cifar(spec, tmp_path, download=False)


@pytest.mark.parametrize("column", [0, -1])
def test_label_out_of_range_is_an_error(fake, tmp_path, column):
    labels = fake.parts[0][1][column]
    wrong = fake.spec.labels[column]
    labels[3] = wrong
    fake.write_binary(tmp_path / "b")
    fake.write_python(tmp_path / "p")
    for root in (tmp_path / "b", tmp_path / "p"):
        with pytest.raises(RecNetsError, match=f"holds the label {wrong}, expected 0 to {wrong - 1}"):
            load_cifar(fake.spec, root, download=False)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_wrong_number_of_names_is_an_error(fake, tmp_path, layout):
    fake.names[1] = fake.names[0]
    getattr(fake, f"write_{layout}")(tmp_path)
    with pytest.raises(RecNetsError, match=r"names \d+ classes, expected"):
        load_cifar(fake.spec, tmp_path, download=False)


def test_unreadable_file_is_an_error(fake10, tmp_path, monkeypatch):
    fake10.write_binary(tmp_path)

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(RecNetsError, match=r"cannot read .*Permission denied"):
        load_cifar(fake10.spec, tmp_path, download=False)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch hacked",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Evil(), protocol=2), "asks for .*system, which no CIFAR file holds"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "asks for builtins.eval"),
        (b"cnumpy\nload\n(S'x'\ntR.", "asks for numpy.load"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(K\x01tR.", "unknown class"),
        (b"cnumpy\ndtype\n(S'O8'\ntR.", "type b'O8', expected unsigned bytes"),
        (b"Phello\n.", "persistent id"),
        (pickle.dumps([1, 2], protocol=2), "holds list, expected a dict"),
        (b"", "not a CIFAR file"),
        (b"\x80\x02}q\x01(U\x05lab", "not a CIFAR file"),
    ],
)
def test_the_unpickler_refuses_everything_else(fake10, tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (fake10.write_python(tmp_path) / "data_batch_2").write_bytes(content)
    with pytest.raises(RecNetsError, match=message):
        load_cifar(fake10.spec, tmp_path, download=False)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((19, 3072), np.uint8)}, "data is .19, 3072., expected uint8 of shape .20, 3072"),
        ({b"data": np.zeros((20, 3072), np.int8)}, "type b'i1', expected unsigned bytes"),
        ({b"data": b"bytes"}, "data is bytes, expected"),
        ({b"labels": [0] * 19}, "labels is not a list of 20 labels"),
        ({b"labels": [0] * 19 + [b"1"]}, "labels is not a list of 20 labels"),
        ({b"labels": [0] * 19 + [-1]}, "holds the label -1"),
    ],
)
def test_wrong_content_of_a_python_file(fake10, tmp_path, write_pickle2, change, message):
    folder = fake10.write_python(tmp_path)
    content = fake10.python_dict(*fake10.parts[0]) | change
    (folder / "data_batch_1").write_bytes(write_pickle2(content))
    with pytest.raises(RecNetsError, match=message):
        load_cifar(fake10.spec, tmp_path, download=False)


def test_array_with_fewer_bytes_than_its_shape_says(fake10, tmp_path, write_pickle2):
    folder = fake10.write_python(tmp_path)
    content = write_pickle2(fake10.python_dict(*fake10.parts[0]))
    assert content.count(b"K\x14M\x00\x0c\x86") == 1
    (folder / "data_batch_1").write_bytes(content.replace(b"K\x14M\x00\x0c\x86", b"K\x15M\x00\x0c\x86"))
    with pytest.raises(RecNetsError, match=r"an array of shape \(21, 3072\) has 61440 bytes"):
        load_cifar(fake10.spec, tmp_path, download=False)


def test_array_in_fortran_order(fake10, tmp_path, write_pickle2):
    folder = fake10.write_python(tmp_path)
    images, labels = fake10.parts[0]
    content = write_pickle2(fake10.python_dict(np.asfortranarray(images), labels))
    (folder / "data_batch_1").write_bytes(content)
    check(load_cifar(fake10.spec, tmp_path, download=False), fake10)


def test_missing_without_download_says_what_to_put_where(tmp_path):
    with pytest.raises(RecNetsError) as caught:
        load_dataset("cifar100", data_dir=tmp_path, download=False)
    message = str(caught.value)
    for part in ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz", str(tmp_path), "RECNETS_DATA", "--data-dir"):
        assert part in message
