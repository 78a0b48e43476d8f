"""Downloads from a local server that breaks off, resumes, lies and disappears; and hostile archives."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading

import pytest

from recnets.data import cifar, download
from recnets.data.cifar import load_cifar
from recnets.data.download import DownloadError, extract, fetch
from recnets.errors import RecNetsError

BODY = bytes(range(256)) * 4000
MD5 = hashlib.md5(BODY).hexdigest()


@pytest.fixture
def target(server, tmp_path):
    server.files["file.bin"] = BODY
    return tmp_path / "file.bin"


def part_of(target):
    return target.with_name("file.bin.part")


def test_plain_download(server, target):
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert not part_of(target).exists()
    assert server.requests == [None]


def test_a_broken_connection_is_resumed(server, target):
    server.cut = [1000, 500_000]
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert server.requests == [None, "bytes=1000-", "bytes=501000-"]


def test_a_later_run_resumes(server, target, monkeypatch):
    monkeypatch.setattr(download, "TRIES", 1)
    server.cut = [1000]
    with pytest.raises(DownloadError, match="cannot download"):
        fetch(server.url + "file.bin", target, MD5)
    assert not target.exists()
    assert part_of(target).read_bytes() == BODY[:1000]
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert server.requests == [None, "bytes=1000-"]


def test_a_server_without_ranges_begins_again(server, target):
    server.ranges = False
    server.cut = [1000]
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY


def test_a_server_that_sends_another_range(server, target):
    part_of(target).write_bytes(BODY[:1000])
    server.wrong_range = True
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert server.requests == ["bytes=1000-", None]


def test_a_complete_part_is_taken_as_it_is(server, target):
    part_of(target).write_bytes(BODY)
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert server.requests == [f"bytes={len(BODY)}-"]


def test_a_damaged_part_is_fetched_again(server, target):
    part_of(target).write_bytes(b"x" * 1000)
    fetch(server.url + "file.bin", target, MD5)
    assert target.read_bytes() == BODY
    assert server.requests == ["bytes=1000-", None]


def test_wrong_md5_leaves_nothing(server, target):
    with pytest.raises(DownloadError, match=f"has the md5 {MD5}, expected {'0' * 32}"):
        fetch(server.url + "file.bin", target, "0" * 32)
    assert list(target.parent.iterdir()) == []


def test_a_busy_server_is_tried_again_and_a_missing_file_is_not(server, target):
    server.status = [503, 429]
    fetch(server.url + "file.bin", target, MD5)
    assert len(server.requests) == 3
    with pytest.raises(DownloadError, match="HTTP 404"):
        fetch(server.url + "other.bin", target, MD5)
    assert len(server.requests) == 4


def test_gives_up_when_nothing_comes(server, target):
    server.status = [500] * 10
    with pytest.raises(DownloadError, match="cannot download"):
        fetch(server.url + "file.bin", target, MD5)
    assert len(server.requests) == download.TRIES


# The whole way: a missing set is downloaded, unpacked and read.


def test_a_missing_set_is_downloaded(fake, server, tmp_path):
    archive = fake.archive(tmp_path)
    server.files[archive.name] = archive.read_bytes()
    server.cut = [500]
    root = tmp_path / "new" / "data"
    data = load_cifar(fake.spec, root)
    assert len(data.train) == 20 * len(fake.binary.train)
    assert sorted(p.name for p in root.iterdir() if not p.name.startswith(".")) == [fake.binary.folder]
    count = len(server.requests)
    load_cifar(fake.spec, root)
    assert len(server.requests) == count


def test_an_archive_put_there_by_hand_needs_no_network(fake, tmp_path):
    fake.archive(tmp_path)
    data = load_cifar(fake.spec, tmp_path, download=False)
    assert len(data.test) == 10
    assert (tmp_path / fake.binary.archive).exists()  # the user's file stays


def test_a_truncated_archive_put_there_by_hand(fake10, tmp_path):
    archive = fake10.archive(tmp_path)
    archive.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(RecNetsError, match=r"has the md5 .* truncated or corrupt; remove it"):
        load_cifar(fake10.spec, tmp_path, download=False)
    assert not (tmp_path / fake10.binary.folder).exists()


def test_a_missing_file_is_added_and_the_others_kept(fake10, server, tmp_path):
    archive = fake10.archive(tmp_path)
    server.files[archive.name] = archive.read_bytes()
    root = tmp_path / "data"
    folder = fake10.write_binary(root)
    (folder / "data_batch_3.bin").unlink()
    (folder / "batches.meta.txt").write_text("\n".join(f"mine{k}" for k in range(10)))
    data = load_cifar(fake10.spec, root)
    assert data.classes[0] == "mine0"
    assert len(data.train) == 100


def test_wrong_md5_of_a_set(fake10, server, tmp_path):
    archive = fake10.archive(tmp_path)
    server.files[archive.name] = archive.read_bytes()[:-1] + b"x"
    with pytest.raises(RecNetsError, match=r"damaged.*Without a network: put cifar-10-binary.tar.gz"):
        load_cifar(fake10.spec, tmp_path / "data")
    assert [p for p in (tmp_path / "data").iterdir() if not p.name.startswith(".")] == []


def test_no_network_says_which_file_to_put_where(fake, tmp_path, server, monkeypatch):
    monkeypatch.setattr(cifar, "BASE_URL", "http://127.0.0.1:9/")  # nothing listens there
    with pytest.raises(RecNetsError) as caught:
        load_cifar(fake.spec, tmp_path / "data")
    message = str(caught.value)
    assert "cannot download http://127.0.0.1:9/" + fake.binary.archive in message
    assert f"put {fake.binary.archive} or {fake.python.archive}" in message
    assert f"into {tmp_path / 'data'}" in message


def test_a_folder_that_cannot_be_made(fake10, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecNetsError, match="cannot put cifar10 into"):
        load_cifar(fake10.spec, tmp_path / "file" / "data")


def test_ranks_that_start_together_download_once(fake10, server, tmp_path):
    archive = fake10.archive(tmp_path)
    server.files[archive.name] = archive.read_bytes()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(load_cifar(fake10.spec, tmp_path / "data"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(data.train) for data in found] == [100] * 4
    assert len(server.requests) == 1


# Archives that somebody else made.


def tar_with(path, *members):
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("../escaped", tarfile.REGTYPE, b"x"),
        ("set/../../escaped", tarfile.REGTYPE, b"x"),
        ("/tmp/escaped", tarfile.REGTYPE, b"x"),
        ("other/escaped", tarfile.REGTYPE, b"x"),
        ("set\\..\\escaped", tarfile.REGTYPE, b"x"),
        ("set/link", tarfile.SYMTYPE, "/etc/passwd"),
        ("set/link", tarfile.LNKTYPE, "../escaped"),
        ("set/pipe", tarfile.FIFOTYPE, b""),
    ],
)
def test_unsafe_members_refuse_the_whole_archive(tmp_path, name, kind, content):
    root = tmp_path / "root"
    root.mkdir()
    archive = tar_with(tmp_path / "a.tar.gz", ("set/good", tarfile.REGTYPE, b"x"), (name, kind, content))
    with pytest.raises(RecNetsError, match="unsafe, nothing was unpacked"):
        extract(archive, "set", ["good"], root)
    assert list(root.iterdir()) == []
    assert not (tmp_path / "escaped").exists()


def test_an_archive_that_would_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_UNPACKED", 100)
    archive = tar_with(tmp_path / "a.tar.gz", ("set/good", tarfile.REGTYPE, b"x" * 101))
    with pytest.raises(RecNetsError, match="would unpack to 101 bytes"):
        extract(archive, "set", ["good"], tmp_path)


def test_an_archive_without_a_file(tmp_path):
    archive = tar_with(tmp_path / "a.tar.gz", ("set/good", tarfile.REGTYPE, b"x"))
    with pytest.raises(RecNetsError, match="holds no set/better"):
        extract(archive, "set", ["good", "better"], tmp_path)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("keep", [0, 20, -20])
def test_an_archive_that_ends_early(tmp_path, keep):
    archive = tar_with(tmp_path / "a.tar.gz", ("set/good", tarfile.REGTYPE, BODY[:100_000]))
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(RecNetsError, match="cannot unpack"):
        extract(archive, "set", ["good"], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar.gz"]
