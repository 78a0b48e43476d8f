"""The folder of a run: what is in it, who may write to it, and how it is read again.

config.toml       everything resolved: recipe, options, versions, device, commit, one entry a session
metrics.jsonl     one line an epoch
checkpoint.pt     the trainer's private state, for --resume
last.safetensors  the weights of the last epoch; best.safetensors where a validation split chose one
summary.json, report.html  once the run has ended
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from recnets.errors import RecNetsError
from recnets.training.options import RunOptions
from recnets.training.recipe import Recipe, recipe_from_dict
from recnets.utils import atomic_write, check_utf8


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested plain values; None is left out, as TOML has no word for it."""
    lines, tables = [], []
    for key, value in values.items():
        name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            tables.append(f"\n[{path}]\n{to_toml(value, path)}")
        elif isinstance(value, Sequence) and value and all(isinstance(v, Mapping) for v in value):
            tables += [f"\n[[{path}]]\n{to_toml(item, path)}" for item in value]
        elif value is not None:
            lines.append(f"{name} = {_toml_value(value)}\n")
    return "".join(lines) + "".join(tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf are TOML's words too
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # JSON's escapes are TOML's, but for characters outside the BMP, which JSON would write as two surrogates.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON that every program reads: NaN and infinity, words of Python's own, are an error."""
    try:
        return json.dumps(values, indent=indent, allow_nan=False)
    except ValueError as error:
        raise RecNetsError(f"a result is not a finite number: {values}") from error


def default_run_path(recipe: Recipe, root: Path = Path("runs")) -> Path:
    """runs/DATE-TIME-MODEL-DATA, not taken yet."""
    data = recipe.data.removeprefix("folder:").rstrip("/").split("/")[-1]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{recipe.model} {data}").strip("-").lower()
    path = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}"
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"{path.name.removesuffix(f'-{count - 1}')}-{count}")
    return path


class RunFolder:
    """A run's files. Use `claim` before writing: it makes the folder and keeps other processes out."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.last = self.path / "last.safetensors"
        self.best = self.path / "best.safetensors"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.files = (
            self.config, self.checkpoint, self.metrics, self.last, self.best, self.summary, self.report
        )  # fmt: skip
        self._lock: IO[str] | None = None

    @property
    def holds_run(self) -> bool:
        """Is there a config.toml that a run wrote?"""
        try:
            return isinstance(self.read_config().get("recipe"), dict)
        except RecNetsError:
            return False

    def check(self, resume: bool) -> None:
        """Refuse, before anything is touched, a folder in which a run would write over what it cannot go on with."""
        check_utf8(str(self.path))  # config.toml holds the command
        if resume and self.checkpoint.exists():
            return
        if not self.holds_run:
            taken = [file for file in self.files if file.exists()]
            if taken:
                raise RecNetsError(
                    f"{taken[0]} is in the way: a run would write over it, and {self.path} holds no run to go on with; "
                    "move it away, or choose another --out"
                )
        elif not resume:
            raise RecNetsError(
                f"{self.path} already holds a run: resume it with --resume {self.path}, or choose another --out"
            )
        elif self._trained():
            raise RecNetsError(
                f"{self.checkpoint} is missing, so the run in {self.path} cannot go on, and a fresh start would write "
                "over its results; put the file back, or start a new run with another --out"
            )

    def _trained(self) -> bool:
        """Is there anything to lose? A run that was killed before its first checkpoint has only begun."""
        begun = any(session.get("epoch") or session.get("step") for session in self.read_sessions())
        written = any(file.exists() for file in (self.last, self.best, self.summary, self.report))
        return begun or written or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def claim(self) -> None:
        """Make the folder, lock it until `release` or the end of the process, and sweep what a kill left behind."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held open: that is the lock)
        except OSError as error:
            raise RecNetsError(f"cannot write to the run folder {self.path}: {error.strerror or error}") from error
        try:
            import fcntl
        except ImportError:  # Windows: no lock, but all else works
            pass
        else:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._lock.close()
                self._lock = None
                raise RecNetsError(f"another process is training in {self.path}") from error
        for file in self.files:
            for leftover in self.path.glob(f".{file.name}.*.tmp"):  # of `atomic_write`
                leftover.unlink(missing_ok=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecNetsError(
                f"{self.path} holds no run to resume (no config.toml); start one with --out {self.path}"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RecNetsError(f"{self.config} cannot be read: {error}") from error

    def read_recipe(self) -> Recipe:
        """The recipe that the run was started with."""
        recipe = self.read_config().get("recipe")
        if not isinstance(recipe, dict):
            raise RecNetsError(
                f"{self.config} is no run's: it has no table [recipe]; start a run with another --out than {self.path}"
            )
        return recipe_from_dict(recipe, source=str(self.config))

    def read_sessions(self) -> list[dict[str, Any]]:
        """When, where and how the run was carried out so far."""
        sessions = self.read_config().get("session", [])
        if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
            raise RecNetsError(f"{self.config} is no run's: its sessions are {sessions!r}")
        return sessions

    def read_options(self) -> RunOptions:
        """The options of the last session, but for those that ended it."""
        sessions = self.read_sessions()
        found = dict(sessions[-1].get("options", {})) if sessions else {}
        names = {f.name for f in dataclasses.fields(RunOptions)} - {"max_seconds", "epochs_until"}
        values = {name: value for name, value in found.items() if name in names}
        if "data_dir" in values:
            values["data_dir"] = Path(values["data_dir"])
        try:
            return RunOptions(**values)
        except (TypeError, ValueError) as error:
            raise RecNetsError(f"{self.config}: {error}") from error

    def write_config(self, recipe: Recipe, session: Mapping[str, Any]) -> None:
        """The recipe, and `session` (when, where, how) added to those before it."""
        sessions = self.read_sessions() if self.config.exists() else []
        values = {"recipe": recipe.to_dict(), "session": [*sessions, dict(session)]}
        atomic_write(self.config, "# Written by recnet train; --resume reads it.\n" + to_toml(values))

    def rewrite_metrics(self, history: Sequence[Mapping[str, Any]]) -> None:
        """metrics.jsonl as the checkpoint knows it: what was written after it will be trained again."""
        atomic_write(self.metrics, "".join(to_json(row) + "\n" for row in history))

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(to_json(row) + "\n")
        except OSError as error:
            raise RecNetsError(f"cannot write {self.metrics}: {error.strerror or error}") from error
