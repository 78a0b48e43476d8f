"""Small helpers that everything may use; nothing of ours is imported here but the error."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from recnets.errors import RecNetsError

HANG_UP = getattr(signal, "SIGHUP", None)  # Windows has none


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean a or b?"` for near names, `""` when nothing is near."""
    known = list(known)
    lowered = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    if not near:
        return ""
    return "; did you mean " + " or ".join(repr(lowered[n]) for n in near) + "?"


def choose(value: str, allowed: Iterable[str], what: str) -> str:
    """`value` if it is one of `allowed`, else a ValueError that names both."""
    allowed = list(allowed)
    if value not in allowed:
        options = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{what} must be one of {options}, got {value!r}{did_you_mean(str(value), allowed)}")
    return value


def positive_int(value: object, what: str, minimum: int = 1) -> int:
    """`value` if it is an int of at least `minimum` (a bool is not), else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{what} must be at least {minimum}, got {value}")
    return value


def image_sides(image_size: object) -> tuple[int, int]:
    """(height, width) of an image size: one side, or a pair."""
    pair = image_size if isinstance(image_size, tuple | list) and len(image_size) == 2 else (image_size, image_size)
    return positive_int(pair[0], "image_size"), positive_int(pair[1], "image_size")


def at_least(value: float, minimum: float, what: str) -> float:
    """`value` if it is a number of at least `minimum` (NaN is not), else a ValueError."""
    if not value >= minimum:
        raise ValueError(f"{what} must be at least {minimum}, got {value}")
    return value


def check_target(path: Path) -> Path:
    """`path` if a file can be written there. Asked before long work, whose result would have nowhere to go."""
    problem = None
    if not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif path.is_dir():
        problem = "it is a folder"
    elif not os.access(path.parent, os.W_OK):
        problem = f"the folder {path.parent} is not writable"
    if problem is not None:
        raise RecNetsError(f"cannot write {path}: {problem}")
    return path


def check_utf8(folder: str) -> str:
    """`folder` if its name can be written into our files, which are UTF-8."""
    try:
        folder.encode()
    except UnicodeEncodeError as error:
        name = os.fsencode(folder)
        raise RecNetsError(
            f"the folder {name!r} has a name that is not UTF-8, as from an old archive: rename it"
        ) from error
    return folder


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C inside: what is under way is put in order before this process ends."""

    def interrupt(number: int, frame: object) -> None:
        if number == HANG_UP:
            signal.signal(number, signal.SIG_IGN)  # a terminal that closes may send more than one
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, HANG_UP):
        if number is None or signal.getsignal(number) == signal.SIG_IGN:  # Windows, nohup
            continue
        with contextlib.suppress(ValueError):  # not the main thread: whoever runs us handles signals
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecNetsError(
            f"this needs the package {module!r}, which is not installed: pip install 'recnets[{extra}]'"
        ) from error


def atomic_write(path: Path | str, content: bytes | str | Callable[[Path], object]) -> None:
    """Write a file whole or not at all: a temporary name in the same folder, synced, then renamed.

    `content` is the bytes or text, or a function that writes the temporary file whose path it is given. On any
    failure (full disk, read-only folder) the old file is untouched and the temporary one is removed.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise RecNetsError(f"cannot write {path}: {error.strerror or error}") from error
    tmp = Path(name)
    try:
        os.close(handle)
        if callable(content):
            content(tmp)
        elif isinstance(content, str):
            tmp.write_text(content, encoding="utf-8")
        else:
            tmp.write_bytes(content)
        mask = os.umask(0)
        os.umask(mask)
        tmp.chmod(0o666 & ~mask)  # mkstemp makes it private; a result is an ordinary file
        sync_file(tmp)
        os.replace(tmp, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RecNetsError(
            f"cannot write {path}: {error.strerror or error}; the old file, if any, is intact"
        ) from error
    finally:
        tmp.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk: a rename must not come there before them."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A rename is durable once its folder is synced; folders cannot be opened so on every system."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from (with `+` if it has changes), None elsewhere.

    RECNETS_COMMIT says it for a copy without its repository (a container, another machine).
    """
    if os.environ.get("RECNETS_COMMIT"):
        return os.environ["RECNETS_COMMIT"]
    folder = Path(__file__).resolve().parent
    if not (folder.parents[1] / ".git").exists():  # an installed copy inside somebody else's repository
        return None

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=folder, check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    found["recnets"] = sys.modules["recnets"].__version__  # of the code that runs, which need not be installed
    for name in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
