"""A run: one network on one data set with one seed, by one recipe, under one name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recnets.experiments.paper import TABLES, Row
from recnets.training import Recipe, load_recipe

# How numbers are rounded, not what is trained: a bf16 run stands for its row as an fp32 one does (the tables say so).
NUMERICS = ("precision", "channels_last")


@dataclass(frozen=True)
class Run:
    """`recipe` is resolved: model, overrides, data set and seed are in it. Equal runs have equal names."""

    name: str
    recipe: Recipe
    recipe_name: str

    @property
    def model(self) -> str:
        return self.recipe.model

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.recipe.model_options)

    @property
    def dataset(self) -> str:
        return self.recipe.data

    @property
    def seed(self) -> int:
        return self.recipe.seed


@dataclass(frozen=True)
class Protocol:
    """The recipe of a whole table: a name or file (None: the table's own), and settings that differ from it."""

    recipe: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, recipe: str | None, settings: Mapping[str, Any] | None = None) -> Protocol:
        return cls(recipe, tuple(sorted((settings or {}).items())))

    @property
    def label(self) -> str:
        """ "epochs = 5, restarts = []": what makes runs by it other than the tables', "" where nothing does."""
        recipe = [] if self.recipe is None else [f"recipe = {Path(self.recipe).stem}"]
        return ", ".join([*recipe, *(f"{key} = {value}" for key, value in self.settings if key not in NUMERICS)])

    def run(self, table: str, row: Row, dataset: str, seed: int) -> Run:
        """The run that fills a row."""
        base = self.recipe or TABLES[table].recipe
        settings = {"model": row.model, "model_options": dict(row.overrides), "data": dataset, "seed": seed}
        recipe = load_recipe(base, **{**dict(self.settings), **settings})
        return Run(self._name(row, dataset, seed, base), recipe, base)

    def _name(self, row: Row, dataset: str, seed: int, base: str) -> str:
        """MODEL[-OVERRIDES]-DATASET[-RECIPE][-SETTINGS]-sSEED; the paper's recipe goes without saying."""
        changes = [(k, v) for k, v in self.settings if k not in NUMERICS]
        parts = [row.model, *_words(row.overrides.items()), dataset]
        if base != "paper":
            parts.append(Path(base).stem)
        return "-".join(_slug(str(part)) for part in [*parts, *_words(changes), f"s{seed}"])


def _words(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{key}_{value}" for key, value in sorted(pairs)]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-")


@dataclass(frozen=True)
class Place:
    """A row of a table on a data set, and the runs that fill it, a seed each."""

    table: str
    row: Row
    dataset: str
    runs: tuple[Run, ...]


def places(tables: Sequence[str], datasets: Sequence[str] | None, seeds: int, protocol: Protocol) -> list[Place]:
    """Every row of `tables` on `datasets` (None: each table's own), in the paper's order."""
    found = []
    for name in tables:
        table = TABLES[name]
        for dataset in datasets or table.datasets:
            for row in table.rows:
                runs = tuple(protocol.run(name, row, dataset, seed) for seed in range(seeds))
                found.append(Place(name, row, dataset, runs))
    return found


def distinct(found: Iterable[Place]) -> list[Run]:
    """The runs of all places, those that several rows share once."""
    return list({run.name: run for place in found for run in place.runs}.values())


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any], ignore: Iterable[str] = ()) -> list[str]:
    """`["epochs: 3 -> 200"]` between two recipes as dicts. One older than a setting was run with its default."""
    skip = set(ignore)
    defaults = Recipe().to_dict()
    old, new = {**defaults, **old}, {**defaults, **new}
    keys = [key for key in new if key not in skip] + [key for key in old if key not in new and key not in skip]
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
