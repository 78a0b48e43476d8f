"""The small helpers."""

import importlib.metadata
import os
import stat
import sys

import pytest

import recnets
from recnets import utils
from recnets.errors import RecNetsError
from recnets.utils import (
    at_least,
    atomic_write,
    check_target,
    choose,
    did_you_mean,
    git_commit,
    image_sides,
    positive_int,
    require,
    versions,
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\x00\xff", b"\x00\xff"), ("größer\n", "größer\n".encode()), (lambda p: p.write_bytes(b"by call"), b"by call")],
    ids=["bytes", "text", "callable"],
)
def test_atomic_write(tmp_path, content, expected):
    path = tmp_path / "out.bin"
    for _ in range(2):  # a new file, then over the old one
        atomic_write(str(path), content)
        assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_check_target(tmp_path):
    assert check_target(tmp_path / "new") == tmp_path / "new"
    with pytest.raises(RecNetsError, match=r"there is no folder .*absent"):
        check_target(tmp_path / "absent" / "new")
    with pytest.raises(RecNetsError, match="it is a folder"):
        check_target(tmp_path)


def test_numbers():
    assert at_least(0.0, 0, "x") == 0
    for value in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"x must be at least 0, got {value}"):
            at_least(value, 0, "x")
    assert image_sides(8) == (8, 8)
    assert image_sides([8, 9]) == (8, 9)
    for wrong in ("32", (1, 2, 3), 2.0, None):
        with pytest.raises(TypeError, match="image_size must be an int"):
            image_sides(wrong)


def test_atomic_write_gives_ordinary_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "out", "x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


class Interrupted(BaseException):
    """Like KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), RecNetsError),
        (ValueError("bad"), ValueError),
        (Interrupted(), Interrupted),
    ],
    ids=["disk full", "bug in the writer", "interrupted"],
)
def test_failed_write_keeps_the_old_file(tmp_path, error, raised):
    path = tmp_path / "out"
    path.write_text("old")

    def half(tmp):
        tmp.write_text("half of the ne")
        raise error

    with pytest.raises(raised) as caught:
        atomic_write(path, half)
    if raised is RecNetsError:
        assert "out: No space left on device; the old file, if any, is intact" in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_text("old")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(utils.os, "replace", refuse)
    with pytest.raises(RecNetsError, match="Permission denied"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_into_a_missing_folder(tmp_path):
    with pytest.raises(RecNetsError, match=r"cannot write .*absent/out: No such file or directory"):
        atomic_write(tmp_path / "absent" / "out", "x")


def test_did_you_mean():
    known = ["recnet_60_640", "recnet_60_1280", "DenseNet"]
    assert did_you_mean("recnet_60_64", known).startswith("; did you mean 'recnet_60_640'")
    assert did_you_mean("densenet", known) == "; did you mean 'DenseNet'?"
    assert did_you_mean("zzz", known) == ""
    assert did_you_mean("x", []) == ""


def test_choose():
    assert choose("b", ("a", "b"), "letter") == "b"
    with pytest.raises(ValueError, match=r"letter must be one of 'a', 'b', got 'c'$"):
        choose("c", ("a", "b"), "letter")
    with pytest.raises(ValueError, match=r"got \['a'\]"):
        choose(["a"], ("a", "b"), "letter")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "n must be at least 1, got 0"),
        (1.0, TypeError, "got 1.0 of type float"),
        (True, TypeError, "True"),
    ],
)
def test_positive_int(value, error, message):
    with pytest.raises(error, match=message):
        positive_int(value, "n")
    assert positive_int(3, "n") == 3
    assert positive_int(0, "n", minimum=0) == 0


def test_require():
    assert require("json", extra="none") is sys.modules["json"]
    with pytest.raises(RecNetsError, match=r"needs the package 'no_such_package'.*pip install 'recnets\[fancy\]'"):
        require("no_such_package", extra="fancy")


def test_versions_of_a_copy_that_is_not_installed(monkeypatch):
    """A ledger entry needs the version on a machine where the package is only on the path, too."""

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert versions()["recnets"] == recnets.__version__


def test_versions_and_commit():
    import torch

    found = versions()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # a package may leave out "+cu130"
    assert {"python", "platform", "numpy", "safetensors"} <= set(found)
    assert all(isinstance(v, str) for v in found.values())
    commit = git_commit()
    assert commit is None or (len(commit.rstrip("+")) == 40 and int(commit.rstrip("+"), 16) >= 0)


def test_git_commit_can_be_said_for_a_copy_without_its_repository(monkeypatch):
    monkeypatch.setenv("RECNETS_COMMIT", "abc123")
    assert git_commit() == "abc123"
