"""The ledger: one JSON file a finished run, `runs/NAME.json`, and one a failed run, `failures/NAME.json`.

Files are written whole or not at all and checked against `SCHEMA` when written and when read.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recnets.errors import RecNetsError
from recnets.experiments.cost import SHAPES, cost
from recnets.experiments.runs import NUMERICS, Run, setting_changes
from recnets.experiments.sessions import gaps, sessions_of, speed
from recnets.training import RunFolder, recipe_from_dict
from recnets.utils import atomic_write, versions

FORMAT = 1

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 1}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_PERCENT = {"type": "number", "minimum": 0, "maximum": 100}
_RATE = {"type": "number", "minimum": 0}
_VERSIONS = {"type": "object", "required": ["python", "torch", "recnets"], "values": _TEXT}

# A subset of JSON Schema ("values": the schema of every member of an object), so that it can be read as such.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "closed": True,
    "required": [
        "format", "name", "model", "overrides", "dataset", "seed", "final_accuracy", "final_top5", "final_loss",
        "parameters", "macs", "recipe_name", "recipe", "epochs", "seconds", "images_per_second", "device", "versions",
        "commit", "command", "finished", "sessions",
    ],
    "properties": {
        "format": {"type": "integer", "enum": [FORMAT]},
        "name": _TEXT,
        "model": _TEXT,
        "overrides": {"type": "object"},
        "dataset": {"type": "string", "enum": list(SHAPES)},
        "seed": {"type": "integer", "minimum": 0},
        "final_accuracy": _PERCENT,
        "final_top5": _PERCENT,
        "final_loss": {"type": "number", "minimum": 0},
        "averaged_accuracy": {**_PERCENT, "null": True},  # entries of before have none
        "parameters": _COUNT,
        "macs": _COUNT,
        "recipe_name": _TEXT,
        "recipe": {"type": "object", "required": ["model", "data", "epochs", "batch_size", "lr", "precision"]},
        "epochs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "closed": True,
                "required": [
                    "epoch", "train_loss", "test_accuracy", "lr", "images_per_second", "input_share", "seconds",
                ],
                "properties": {
                    "epoch": _COUNT,
                    "train_loss": {"type": "number"},
                    "test_accuracy": {**_PERCENT, "null": True},
                    "lr": {"type": "number", "minimum": 0},
                    "images_per_second": _RATE,
                    "input_share": _RATE,
                    "seconds": _POSITIVE,
                },
            },
        },
        "seconds": _POSITIVE,
        "images_per_second": _POSITIVE,
        "device": _TEXT,
        "versions": _VERSIONS,
        "commit": {"type": "string", "null": True},
        "command": _TEXT,
        "finished": _TEXT,
        "sessions": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "closed": True,
                "required": [
                    "first_epoch", "from_step", "last_epoch", "started", "device", "commit", "images_per_second",
                    "input_share", "versions",
                ],
                "properties": {
                    "first_epoch": _COUNT,
                    "from_step": {"type": "integer", "minimum": 0},
                    "last_epoch": _COUNT,
                    "started": _TEXT,
                    "device": _TEXT,
                    "commit": {"type": "string", "null": True},
                    "images_per_second": {**_RATE, "null": True},
                    "input_share": {**_RATE, "null": True},
                    "versions": {"type": "object", "required": ["python", "torch"], "values": _TEXT},
                },
            },
        },
    },
}  # fmt: skip

FAILURE: dict[str, Any] = {
    "type": "object",
    "closed": True,
    "required": ["format", "name", "model", "overrides", "dataset", "seed", "reason", "command", "versions", "when"],
    "properties": {
        "format": {"type": "integer", "enum": [FORMAT]},
        **dict.fromkeys(("name", "model", "dataset", "reason", "command", "when"), _TEXT),
        "overrides": {"type": "object"},
        "seed": {"type": "integer", "minimum": 0},
        "versions": _VERSIONS,
    },
}

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
}


def faults(value: Any, schema: Mapping[str, Any], where: str = "") -> list[str]:
    """What in `value` breaks `schema`, each as "where: what"."""
    at = where or "the file"
    if value is None and schema.get("null"):
        return []
    if isinstance(value, bool) or not isinstance(value, _TYPES[schema["type"]]):
        return [f"{at}: expected {schema['type']}, got {value!r}"]
    found = []
    if isinstance(value, dict):
        members = schema.get("properties", {})
        found += [f"{at}: {key!r} is missing" for key in schema.get("required", ()) if key not in value]
        if schema.get("closed"):
            found += [f"{at}: {key!r} is unknown" for key in value if key not in members]
        for key, item in value.items():
            below = members.get(key, schema.get("values"))
            found += faults(item, below, f"{where}.{key}".lstrip(".")) if below else []
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{at}: at least {schema['minItems']} items expected")
        for i, item in enumerate(value):
            found += faults(item, schema["items"], f"{where}[{i}]")
    else:
        found += _bounds(value, schema, at)
    return found


def _bounds(value: Any, schema: Mapping[str, Any], at: str) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{at}: expected a finite number, got {value!r}"]
    good = (
        ("minimum", lambda limit: value >= limit),
        ("maximum", lambda limit: value <= limit),
        ("exclusiveMinimum", lambda limit: value > limit),
        ("minLength", lambda limit: len(value) >= limit),
        ("enum", lambda limit: value in limit),
    )
    broken = [key for key, holds in good if key in schema and not holds(schema[key])]
    return [f"{at}: {value!r} breaks {key} {schema[key]!r}" for key in broken]


def check_entry(entry: Any) -> list[str]:
    """What is wrong with a ledger entry: the schema first, then what must agree with what."""
    found = faults(entry, SCHEMA)
    if found:
        return found
    recipe, epochs = entry["recipe"], entry["epochs"]
    try:
        recipe_from_dict(recipe)
    except RecNetsError as error:
        found.append(str(error))
    for key, other in (("model", "model"), ("overrides", "model_options"), ("dataset", "data"), ("seed", "seed")):
        if entry[key] != recipe.get(other):
            found.append(f"{key} is {entry[key]!r}, but the recipe's {other} is {recipe.get(other)!r}")
    if [row["epoch"] for row in epochs] != list(range(1, recipe["epochs"] + 1)):
        found.append(f"epochs: expected 1 to {recipe['epochs']}, each once")
    if epochs[-1]["test_accuracy"] != entry["final_accuracy"]:
        found.append(f"final_accuracy is {entry['final_accuracy']}, the last epoch's is {epochs[-1]['test_accuracy']}")
    return found + gaps(entry["sessions"], recipe["epochs"])


class Ledger:
    """The results folder: finished runs, and failures with their reason."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.runs, self.failures = self.folder / "runs", self.folder / "failures"

    def check_writable(self) -> None:
        """Asked before long work, whose result would have nowhere to go."""
        self._make(self.runs)
        if not os.access(self.runs, os.W_OK):
            raise RecNetsError(f"cannot write to {self.runs}: Permission denied")

    def entries(self) -> dict[str, dict[str, Any]]:
        """Every finished run by name; a file that is not a ledger entry is an error that says why."""
        return {path.stem: _read(path, check_entry) for path in sorted(self.runs.glob("*.json"))}

    def failed(self) -> dict[str, dict[str, Any]]:
        """Every failed run by name."""
        return {p.stem: _read(p, lambda v: faults(v, FAILURE)) for p in sorted(self.failures.glob("*.json"))}

    def add(self, entry: Mapping[str, Any]) -> Path:
        """Write a finished run; what was recorded of its failure is past."""
        found = check_entry(entry)
        if found:
            raise ValueError(f"not a ledger entry: {'; '.join(found)}")
        path = self.runs / f"{entry['name']}.json"
        self._write(path, _layout(entry))
        (self.failures / path.name).unlink(missing_ok=True)
        return path

    def add_failure(self, run: Run, reason: str, command: str) -> Path:
        """Record that a run failed, and why."""
        record = {
            "format": FORMAT,
            **_identity(run),
            "reason": " ".join(reason.split()) or "no reason was given",
            "command": command,
            "versions": versions(),
            "when": _written(),
        }
        path = self.failures / f"{run.name}.json"
        self._write(path, json.dumps(record, indent=1) + "\n")
        return path

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecNetsError(f"cannot make {folder}: {error.strerror or error}") from error

    def _write(self, path: Path, text: str) -> None:
        self._make(path.parent)
        atomic_write(path, text)

    def done(self, run: Run, entries: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
        """Is the run in the ledger? One of its name by other settings is an error: neither may pass for the other."""
        entry = (self.entries() if entries is None else entries).get(run.name)
        if entry is None:
            return False
        changes = setting_changes(entry["recipe"], run.recipe.to_dict(), NUMERICS)
        if changes:
            raise RecNetsError(
                f"{self.runs / run.name}.json was run with other settings ({'; '.join(changes)}); "
                "move it away, or choose another --results"
            )
        return True


def _layout(entry: Mapping[str, Any]) -> str:
    """Indented JSON with one line a session and an epoch: short enough to read, and to compare by line."""
    lists = ("sessions", "epochs")
    text = json.dumps({key: value for key, value in entry.items() if key not in lists}, indent=1).removesuffix("\n}")
    for key in lists:
        text += f',\n "{key}": [\n' + ",\n".join("  " + json.dumps(row) for row in entry[key]) + "\n ]"
    return text + "\n}\n"


def _read(path: Path, check: Any) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecNetsError(f"{path} cannot be read: {error}") from error
    found = check(value)
    if not found and value["name"] != path.stem:
        found = [f"name is {value['name']!r}, expected {path.stem!r}"]
    if found:
        raise RecNetsError(f"{path} is not a ledger entry: {'; '.join(found[:3])}")
    return dict(value)


def _identity(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "model": run.model,
        "overrides": run.overrides,
        "dataset": run.dataset,
        "seed": run.seed,
    }


def _written(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a line that is being written is left out."""
    try:
        text = folder.metrics.read_text(encoding="utf-8")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def entry_from_folder(run: Run, path: Path, command: str) -> dict[str, Any]:
    """The ledger entry of a run folder that `recnets.training.train` has finished."""
    folder = RunFolder(path)
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecNetsError(f"{path} holds no finished run: {error}") from error
    if not summary["finished"]:
        raise RecNetsError(f"{path} stopped after {summary['epochs']} of {run.recipe.epochs} epochs")
    rows = read_metrics(folder)
    sessions = sessions_of(folder.read_config().get("session", []), rows)
    epochs = [
        {
            "epoch": row["epoch"],
            "train_loss": _rounded(row["train_loss"]),
            "test_accuracy": _rounded(row.get("test_accuracy")),
            "lr": row["lr"],
            "images_per_second": _rounded(row["images_per_second"]),
            "input_share": _rounded(row["input_share"]),
            "seconds": _rounded(row["seconds"]),
        }
        for row in rows
    ]
    return {
        "format": FORMAT,
        **_identity(run),
        "final_accuracy": _rounded(summary["final_accuracy"]),
        "final_top5": _rounded(summary["final_top5"]),
        "final_loss": _rounded(summary["final_loss"]),
        "averaged_accuracy": _rounded(summary.get("averaged_accuracy")),
        "parameters": summary["parameters"],
        "macs": cost(run.model, run.overrides, run.dataset).macs,
        "recipe_name": Path(run.recipe_name).stem,
        "recipe": run.recipe.to_dict(),
        "seconds": _rounded(summary["seconds"]),
        "images_per_second": speed(sessions) or _rounded(summary["images_per_second"]),
        "device": summary["device"],
        "versions": summary["versions"],
        "commit": summary["commit"],
        "command": command,
        "finished": _written(folder.summary.stat().st_mtime),
        "sessions": sessions,
        "epochs": epochs,
    }


def _rounded(value: float | None) -> float | None:
    """Six digits after the point are more than any of these measures has."""
    return None if value is None else round(value, 6)
