"""Fetch a file over HTTP with resume and a checksum, and unpack an archive that nobody has to be trusted for."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import socket
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from recnets.errors import RecNetsError

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # connections that bring nothing new, in a row, before giving up
PAUSE = 1.0  # seconds before the second try; doubled for each further one
MAX_UNPACKED = 1 << 30  # bytes; the largest set here is 186 MB unpacked

_BROKEN = (urllib.error.URLError, http.client.HTTPException, socket.timeout, ConnectionError, TimeoutError)


class DownloadError(RecNetsError):
    """The file could not be fetched; what did arrive is kept for the next try."""


def file_md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch(url: str, path: Path, md5: str) -> None:
    """Download `url` to `path`, which appears only when whole and with the right md5.

    The bytes are gathered in `path` + ".part"; an interrupted download, in this process or an earlier one, goes
    on where it stopped if the server can do that, and begins again if it cannot.
    """
    part = path.with_name(path.name + ".part")
    resumed = part.exists()
    _fetch_all(url, part)
    found = file_md5(part)
    if found != md5 and resumed:  # the old beginning may be at fault: once more without it
        part.unlink()
        _fetch_all(url, part)
        found = file_md5(part)
    if found != md5:
        part.unlink()
        raise DownloadError(f"{url} has the md5 {found}, expected {md5}: the download was damaged, it is removed")
    os.replace(part, path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch_all(url: str, part: Path) -> None:
    # Here and not above: reading data that is there needs no rich.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    if not console.is_terminal:
        console.print(f"downloading {url}", highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(part.name.removesuffix(".part"), total=None)
        failures, most = 0, _size(part)
        while True:
            try:
                for done, total in _fetch_once(url, part):
                    progress.update(task, completed=done, total=total)
                return
            except _BROKEN as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429):
                    raise DownloadError(f"cannot download {url}: HTTP {error.code} {error.reason}") from error
                failures = 1 if _size(part) > most else failures + 1
                most = max(most, _size(part))
                if failures >= TRIES:
                    reason = getattr(error, "reason", None) or error
                    raise DownloadError(f"cannot download {url}: {reason}") from error
                time.sleep(PAUSE * 2 ** (failures - 1))


def _fetch_once(url: str, part: Path) -> Iterator[tuple[int, int | None]]:
    """One connection: append to `part` what is missing of it; yields (bytes so far, total if known)."""
    have = _size(part)
    headers = {"User-Agent": "recnets", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing lies beyond what we have: whole, or wrong, as the md5 will tell
            return
        raise
    with response:
        if response.status == 206 and not (response.headers["Content-Range"] or "").startswith(f"bytes {have}-"):
            part.unlink()
            raise ConnectionError("the server sent another part of the file than was asked for")
        if response.status != 206:
            have = 0  # it sends the whole file: begin again
        length = response.headers["Content-Length"]
        total = have + int(length) if length else None
        with open(part, "ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                yield have, total
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended after {have:,} of {total:,} bytes")


def extract(archive: Path, folder: str, wanted: Iterable[str], root: Path) -> None:
    """Unpack `archive` (.tar.gz with everything under `folder`/) into `root`/`folder`, whole or not at all.

    A folder that is there already keeps the files it has and gets the missing ones of `wanted`.
    """
    try:
        tmp = Path(tempfile.mkdtemp(prefix=f".{folder}.", suffix=".tmp", dir=root))
    except OSError as error:
        raise RecNetsError(f"cannot unpack into {root}: {error.strerror or error}") from error
    try:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                _check_members(archive, tar.getmembers(), folder)
                tar.extractall(tmp, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise RecNetsError(f"cannot unpack {archive}: {error}; remove it to have it downloaded again") from error
        unpacked, target = tmp / folder, root / folder
        missing = [name for name in wanted if not (unpacked / name).is_file()]
        if missing:
            raise RecNetsError(f"{archive} holds no {folder}/{missing[0]}: it is not the archive its name says")
        if not target.exists():
            os.replace(unpacked, target)
            return
        for name in wanted:
            if not (target / name).exists():
                os.replace(unpacked / name, target / name)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _check_members(archive: Path, members: list[tarfile.TarInfo], folder: str) -> None:
    """Refuse the whole archive for one member that is not a plain file or folder below `folder`."""
    for member in members:
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()):
            raise RecNetsError(f"{archive} holds {member.name!r}, a link or device: unsafe, nothing was unpacked")
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or path.parts[:1] != (folder,):
            raise RecNetsError(f"{archive} holds {member.name!r}, outside {folder}/: unsafe, nothing was unpacked")
    size = sum(member.size for member in members)
    if size > MAX_UNPACKED:
        raise RecNetsError(f"{archive} would unpack to {size:,} bytes, more than {MAX_UNPACKED:,}: nothing unpacked")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """One process at a time (ranks of one run start together); the system frees it when the holder dies."""
    try:
        import fcntl
    except ImportError:  # no such locks there; the md5 still guards what is read
        yield
        return
    with open(folder / ".recnets.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
