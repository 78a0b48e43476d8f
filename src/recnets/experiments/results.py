"""The ledger seen through the tables: for every row, what the paper has, what we measured, and what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recnets.experiments.cost import Cost, cost, parameters
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import TABLES, Row
from recnets.experiments.runs import NUMERICS, Place, Protocol, places, setting_changes

IDENTITY = ("model", "model_options", "data", "seed")


@dataclass(frozen=True)
class Outcome:
    """A row on a data set. `entries` are its finished runs, a seed each; `failure` is why there is none."""

    place: Place
    entries: tuple[dict[str, Any], ...]
    failure: str | None

    @property
    def row(self) -> Row:
        return self.place.row

    @property
    def paper(self) -> float | None:
        return self.row.accuracy.get(self.place.dataset)

    @property
    def accuracies(self) -> list[float]:
        return [entry["final_accuracy"] for entry in self.entries]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.entries else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds."""
        return statistics.stdev(self.accuracies) if len(self.entries) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper

    @property
    def cost(self) -> Cost:
        return cost(self.row.model, self.row.overrides, self.place.dataset)

    def hidden_parameters(self) -> int | None:
        """Parameters with the classifier that the paper's counts imply; None for other networks than RecNets."""
        if not self.row.model.startswith("recnet_"):
            return None
        return parameters(self.row.model, {**self.row.overrides, "head": "hidden"}, self.place.dataset)

    def linear_parameters(self) -> int:
        """Parameters with the classifier of the paper's architecture table."""
        overrides = {key: value for key, value in self.row.overrides.items() if key != "head"}
        return parameters(self.row.model, overrides, self.place.dataset)


@dataclass(frozen=True)
class Results:
    """All outcomes in the order of the tables, and the entries that fill no row by this protocol.

    `runs` is where the ledger's files are, seen from the folder that the tables are written to.
    """

    protocol: Protocol
    outcomes: tuple[Outcome, ...]
    others: tuple[dict[str, Any], ...]
    runs: str = "runs"

    def of(self, table: str, dataset: str | None = None) -> list[Outcome]:
        return [o for o in self.outcomes if o.place.table == table and dataset in (None, o.place.dataset)]

    @property
    def used(self) -> list[dict[str, Any]]:
        """The entries that fill a row, each once."""
        return list({entry["name"]: entry for outcome in self.outcomes for entry in outcome.entries}.values())

    @property
    def tables(self) -> list[str]:
        """The paper's tables, and the others where there is something to show."""
        return [name for name, t in TABLES.items() if not t.extra or any(o.entries or o.failure for o in self.of(name))]


def collect(ledger: Ledger, protocol: Protocol, runs: str = "runs") -> Results:
    """Match the ledger's entries to rows: the same network, data set and settings, whatever seed and rounding."""
    entries, failed = list(ledger.entries().values()), list(ledger.failed().values())
    outcomes = []
    for place in places(list(TABLES), None, 1, protocol):
        recipe = place.runs[0].recipe.to_dict()
        mine = [e for e in entries if _same_network(e, place)]
        fitting = [e for e in mine if not setting_changes(recipe, e["recipe"], (*NUMERICS, "seed"))]
        stem = place.runs[0].name.removesuffix("-s0")
        broken = [f for f in failed if f["name"].rpartition("-s")[0] == stem]
        reason = broken[0]["reason"] if broken and not fitting else None
        outcomes.append(Outcome(place, tuple(sorted(fitting, key=lambda e: e["seed"])), reason))
    used = {e["name"] for outcome in outcomes for e in outcome.entries}
    return Results(protocol, tuple(outcomes), tuple(e for e in entries if e["name"] not in used), runs)


def _same_network(entry: Mapping[str, Any], place: Place) -> bool:
    wanted = (place.row.model, dict(place.row.overrides), place.dataset)
    return (entry["model"], entry["overrides"], entry["dataset"]) == wanted


def differences(entries: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any]) -> dict[str, list[str]]:
    """Settings that differ from `recipe`, each with the names of the runs that have it so."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for change in setting_changes(recipe, entry["recipe"], IDENTITY):
            found.setdefault(change, []).append(entry["name"])
    return found
