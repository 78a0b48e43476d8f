"""The points of the size-accuracy figure: a network each, the paper's accuracy and ours, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recnets.experiments.latency import by_network
from recnets.experiments.results import Results
from recnets.models import model_info

FIGURE_TABLES = ("2", "3")  # the networks that are compared; Table 1 varies one of them

FAMILIES = {
    "recnet": ("RecNet", "#d1355b"),
    "densenet": ("DenseNet", "#1f6fb4"),
    "pyramidnet": ("PyramidNet", "#7a4fbf"),
    "wrn": ("WRN", "#2a9d6f"),
    "resnet": ("ResNet", "#c77f12"),
    "resnext": ("ResNeXt", "#8a6a3b"),
    "mobilenet": ("MobileNet", "#5b7083"),
    "googlenet": ("GoogLeNet", "#0d9aa8"),
}


@dataclass(frozen=True)
class Axis:
    """What accuracy is drawn against; `paper_own`: the paper's points have their own figure for it."""

    name: str
    label: str
    unit: str
    paper_own: bool = False


AXES = (
    Axis("parameters", "Parameters (millions)", "M", paper_own=True),
    Axis("macs", "Multiply-adds for one 32×32 picture (millions)", "M"),
    Axis("latency", "CPU time of one picture (ms)", "ms"),
)


@dataclass(frozen=True)
class Point:
    """`x` and `paper_x` by the axis's name, in its unit; absent where not known."""

    title: str
    family: str
    paper: float | None
    ours: float | None
    x: Mapping[str, float]
    paper_x: Mapping[str, float]

    def places(self, axis: str) -> list[tuple[str, float, float]]:
        """("paper" or "ours", x, accuracy), as far as they are known."""
        found = []
        for kind, accuracy, x in (("paper", self.paper, self.paper_x), ("ours", self.ours, self.x)):
            if accuracy is not None and axis in x:
                found.append((kind, x[axis], accuracy))
        return found


def printed_millions(text: str) -> float:
    """ "1,769K" and "6.8M" as millions."""
    match = re.fullmatch(r"([\d,.]+)([KM])", text)
    if match is None:
        raise ValueError(f"expected a count such as '471K' or '6.8M', got {text!r}")
    return float(match[1].replace(",", "")) / (1000 if match[2] == "K" else 1)


def points(results: Results, latency: Mapping[str, Any] | None, dataset: str) -> list[Point]:
    """The networks of Tables 2 and 3 on a data set, each once."""
    times = by_network(latency)
    found = []
    for table in FIGURE_TABLES:
        for outcome in results.of(table, dataset):
            row, (count, macs) = outcome.row, outcome.cost
            x = {"parameters": count / 1e6, "macs": macs / 1e6}
            if row.title in times:
                x["latency"] = times[row.title]
            printed = {"parameters": printed_millions(row.parameters)} if row.parameters else {}
            family = model_info(row.model).family
            found.append(Point(row.title, family, outcome.paper, outcome.mean, x, {**x, **printed}))
    return found
