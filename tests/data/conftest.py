"""Tiny CIFAR sets in the official layouts, and an HTTP server that misbehaves on demand."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from recnets.data import cifar, download

TRAIN_PER_FILE, TEST_PER_FILE = 20, 10


class Python2Pickle:
    """Writes protocol 2 as Python 2's cPickle did (byte strings, memo from 1); the official files look like this."""

    def __init__(self) -> None:
        self.out, self.memo = bytearray(b"\x80\x02"), 0

    def put(self, value: object) -> None:
        if isinstance(value, dict):
            self._mark(b"}")
            self.out += b"("
            for key, item in value.items():
                self.put(key)
                self.put(item)
            self.out += b"u"
        elif isinstance(value, list):
            self._mark(b"]")
            self.out += b"("
            for item in value:
                self.put(item)
            self.out += b"e"
        elif isinstance(value, bytes):
            head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
            self._mark(head + value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, int):
            self.out += b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
            if 256 <= value < 65536:
                self.out[-5:] = b"M" + struct.pack("<H", value)
        else:
            raise TypeError(type(value))

    def _mark(self, code: bytes) -> None:
        self.memo += 1
        self.out += code + (b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<i", self.memo))

    def _array(self, value: np.ndarray) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        for n in value.shape:
            self.put(n)
        kind = value.dtype.str[1:].encode()
        self.out += b"\x86cnumpy\ndtype\nU\x02" + kind + b"K\x00K\x01\x87R(K\x03U\x01|NNN"
        self.out += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        self.out += b"\x88" if value.flags.f_contiguous and not value.flags.c_contiguous else b"\x89"
        raw = value.tobytes(order="A")
        self.out += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"


def pickle2(value: object) -> bytes:
    writer = Python2Pickle()
    writer.put(value)
    return bytes(writer.out + b".")


class FakeCifar:
    """Random images and labels of the spec's form, written in either layout."""

    def __init__(self, name: str) -> None:
        self.spec = dataclasses.replace(
            cifar.SPECS[name],
            train_per_file=TRAIN_PER_FILE,
            test_per_file=TEST_PER_FILE,
            layouts=tuple(dataclasses.replace(layout, md5={}) for layout in cifar.SPECS[name].layouts),
        )
        self.binary, self.python = self.spec.layouts
        random = np.random.default_rng(0)
        self.names = [f"class{k}".encode() for k in range(self.spec.labels[-1])]
        self.parts = []  # one (images, label columns) a file, train then test
        for count in [TRAIN_PER_FILE] * len(self.binary.train) + [TEST_PER_FILE]:
            images = random.integers(0, 256, (count, 3072), dtype=np.uint8)
            labels = [random.integers(0, classes, count, dtype=np.uint8) for classes in self.spec.labels]
            self.parts.append((images, labels))

    def write_binary(self, root: Path) -> Path:
        folder = root / self.binary.folder
        folder.mkdir(parents=True)
        for name, (images, labels) in zip((*self.binary.train, *self.binary.test), self.parts, strict=True):
            columns = [column[:, None] for column in labels]
            (folder / name).write_bytes(np.concatenate([*columns, images], axis=1).tobytes())
        (folder / self.binary.names).write_bytes(b"\n".join(self.names) + b"\n\n")
        return folder

    def write_python(self, root: Path) -> Path:
        folder = root / self.python.folder
        folder.mkdir(parents=True)
        for name, part in zip((*self.python.train, *self.python.test), self.parts, strict=True):
            (folder / name).write_bytes(pickle2(self.python_dict(*part)))
        (folder / self.python.names).write_bytes(pickle2({self.spec.names_key: self.names}))
        return folder

    def python_dict(self, images: np.ndarray, labels: list[np.ndarray]) -> dict[bytes, object]:
        columns = {key: column.tolist() for key, column in zip(self.spec.label_keys, labels, strict=True)}
        names = [f"{k}.png".encode() for k in range(len(images))]
        return {b"batch_label": b"a batch", **columns, b"data": images, b"filenames": names}

    def archive(self, root: Path) -> Path:
        """The binary layout as the archive, with the spec's md5 changed to match."""
        folder = self.write_binary(root / "packing")
        path = root / self.binary.archive
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder, arcname=folder.name)
        self.expect_archive(hashlib.md5(path.read_bytes()).hexdigest())
        return path

    def expect_archive(self, md5: str) -> None:
        self.binary = dataclasses.replace(self.binary, archive_md5=md5)
        self.spec = dataclasses.replace(self.spec, layouts=(self.binary, self.python))


@pytest.fixture(params=["cifar10", "cifar100"])
def fake(request: pytest.FixtureRequest) -> FakeCifar:
    return FakeCifar(request.param)


@pytest.fixture
def fake10() -> FakeCifar:
    return FakeCifar("cifar10")


@pytest.fixture
def write_pickle2():
    return pickle2


class Server:
    """Serves `files`; `cut` ends that many answers early, `ranges` and `status` change how it answers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str | None] = []  # the Range header of each request
        self.cut: list[int] = []  # bytes to send before the connection breaks, for the next answers
        self.ranges = True
        self.wrong_range = False
        self.status: list[int] = []  # statuses for the next answers
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers["Range"]
        self.requests.append(wanted)
        body = self.files.get(request.path[1:])
        if self.status or body is None:
            request.send_error(self.status.pop(0) if self.status else 404)
            return
        start = 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                request.send_error(416)
                return
            request.send_response(206)
            shown = start + 1 if self.wrong_range else start
            request.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        stop = start + self.cut.pop(0) if self.cut else len(body)
        request.wfile.write(body[start:stop])

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    running = Server()
    monkeypatch.setattr(cifar, "BASE_URL", running.url)
    yield running
    running.close()
