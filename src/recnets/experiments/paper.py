"""Every row of the paper's tables as data: what to build, and the numbers that the paper gives.

A row is a registered model and what it overrides, so that the same network in two tables is the same run. Defaults
are never spelled out (e = 4 is not an override of recnet_60_1280): equal networks must have equal overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recnets.models import model_info


@dataclass(frozen=True)
class Row:
    """`cells` stand under the table's header; `accuracy` is the paper's, in percent, by data set; `parameters` is
    what the paper prints for 100 classes."""

    cells: tuple[str, ...]
    model: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    parameters: str | None = None
    note: str = ""

    @property
    def title(self) -> str:
        """The network's name, with what makes it differ: "RecNet-60-1280, e = 2"."""
        info = "Tiny RecNet" if self.model.startswith("RecNet(") else model_info(self.model).title
        changes = ", ".join(f"{key} = {value}" for key, value in self.overrides.items())
        return f"{info}, {changes}" if changes else info


@dataclass(frozen=True)
class Table:
    """`extra` tables are not the paper's; they are run and shown only when asked for."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    datasets: tuple[str, ...] = ("cifar10", "cifar100")
    recipe: str = "paper"
    extra: bool = False


def _both(cifar10: float, cifar100: float) -> dict[str, float]:
    return {"cifar10": cifar10, "cifar100": cifar100}


def _crc(*cells: str, params: str | None, accuracy: dict[str, float], **overrides: Any) -> Row:
    """A row of Table 1: RecNet(4, 8, 16, 32, 10, 10, 10) and one change."""
    return Row(cells, "recnet_60_1280", overrides, accuracy, params)


def _size(s: str, d: str, title: str, params: str, cifar10: float, cifar100: float) -> Row:
    """A row of Table 2."""
    return Row((f"RecNet(4, {s}, {d})", title), _name(title), {}, _both(cifar10, cifar100), params)


def _other(title: str, params: str, cifar100: float, model: str | None = None) -> Row:
    """A row of Table 3, which has CIFAR-100 only; what is to be said of a size is in the model's own record."""
    name = model or _name(title)
    return Row((title,), name, {}, {"cifar100": cifar100}, params, model_info(name).note)


def _name(title: str) -> str:
    return title.lower().replace("-", "_")


DEFAULT = _both(95.15, 78.25)  # the network that Tables 1a to 1d and 2 share

_TABLES = (
    Table(
        "1a",
        "Table 1a: non-linearity",
        ("Non-linearity σ",),
        (
            _crc("ReLU", params=None, accuracy=_both(94.62, 75.48), nonlinearity="relu"),
            _crc("shared BN + ReLU", params=None, accuracy=_both(87.44, 62.70), nonlinearity="shared_bn_relu"),
            _crc("separate BN + ReLU", params=None, accuracy=DEFAULT),
            _crc("None (linear)", params=None, accuracy=_both(94.24, 75.71), nonlinearity="linear"),
        ),
    ),
    Table(
        "1b",
        "Table 1b: expansion e",
        ("e",),
        (
            _crc("1", params="424K", accuracy=_both(93.38, 71.94), e=1),
            _crc("2", params="824K", accuracy=_both(94.16, 73.10), e=2),
            _crc("4 (default)", params="1,769K", accuracy=DEFAULT),
            _crc("8", params="4,239K", accuracy=_both(95.47, 79.33), e=8),
        ),
    ),
    Table(
        "1c",
        "Table 1c: kernel sizes",
        ("W_x", "W_h"),
        (
            _crc("3×3", "1×1", params="1,425K", accuracy=_both(94.71, 77.48), kernel_h=1),
            _crc("1×1", "3×3", params="1,683K", accuracy=_both(94.72, 77.42), kernel_x=1),
            _crc("3×3", "3×3", params="1,769K", accuracy=DEFAULT),
        ),
    ),
    Table(
        "1d",
        "Table 1d: recurrent or grouped",
        ("Convolution",),
        (
            _crc("recurrent", params="1,769K", accuracy=DEFAULT),
            _crc("grouped", params="1,769K", accuracy=_both(94.65, 76.04), recurrent=False),
        ),
    ),
    Table(
        "2",
        "Table 2: depth and width",
        ("Architecture (e, S1, S2, S3, d1, d2, d3)", "Acronym"),
        (
            _size("4, 8, 16", "10, 10, 10", "RecNet-60-640", "471K", 93.45, 74.94),
            _size("4, 8, 16", "15, 15, 15", "RecNet-90-960", "863K", 94.32, 76.31),
            _size("4, 8, 16", "20, 20, 20", "RecNet-120-1280", "1,406K", 94.58, 77.62),
            _size("8, 16, 32", "10, 10, 10", "RecNet-60-1280", "1,769K", 95.15, 78.25),
            _size("8, 16, 32", "15, 15, 15", "RecNet-90-1920", "3,306K", 95.22, 79.01),
            _size("8, 16, 32", "20, 20, 20", "RecNet-120-2560", "5,444K", 95.46, 80.31),
            _size("8, 8, 8", "5, 10, 15", "RecNet-60-480", "316K", 93.28, 73.68),
            _size("8, 8, 8", "10, 15, 20", "RecNet-90-640", "537K", 93.95, 75.86),
            _size("8, 8, 8", "10, 20, 30", "RecNet-120-960", "930K", 94.44, 77.58),
            _size("16, 16, 16", "5, 10, 15", "RecNet-60-960", "1,137K", 94.54, 77.91),
            _size("16, 16, 16", "10, 15, 20", "RecNet-90-1280", "2,028K", 94.77, 78.00),
            _size("16, 16, 16", "10, 20, 30", "RecNet-120-1920", "3,569K", 95.47, 79.38),
        ),
    ),
    Table(
        "3",
        "Table 3: other networks below 10M parameters",
        ("Model",),
        (
            _other("GoogLeNet", "6.8M", 77.91),
            _other("ResNet-110", "1.7M", 75.73),
            _other("WRN-40-1", "0.6M", 69.11),
            _other("WRN-40-2", "2.2M", 73.96),
            _other("WRN-40-4", "8.9M", 77.11),
            _other("MobileNet", "3.3M", 73.65),
            _other("ResNeXt-29, 1x64d", "4.5M", 77.85, "resnext_29_1x64d"),
            _other("PyramidNet-48", "1.7M", 76.78, "pyramidnet_110_48"),
            _other("PyramidNet-84", "3.8M", 79.12, "pyramidnet_110_84"),
            _other("DenseNet-40-12", "1.0M", 75.58),
            _other("DenseNet-100-12", "7.0M", 79.80),
            _other("DenseNet-BC-40-18", "0.4M", 74.72),
            _other("DenseNet-BC-100-12", "0.8M", 77.73),
            _other("RecNet-30-60", "0.2M", 70.85),
            _other("RecNet-120-2880", "8.2M", 80.56),
        ),
    ),
    Table(
        "heads",
        "The classifier that the paper's parameter counts imply",
        ("Model",),
        (
            Row(("RecNet-60-1280, hidden head",), "recnet_60_1280", {"head": "hidden"}, DEFAULT, "1,769K"),
            Row(("RecNet-60-480, hidden head",), "recnet_60_480", {"head": "hidden"}, _both(93.28, 73.68), "316K"),
            Row(("RecNet-90-960, hidden head",), "recnet_90_960", {"head": "hidden"}, _both(94.32, 76.31), "863K"),
            Row(("RecNet-90-640, hidden head",), "recnet_90_640", {"head": "hidden"}, _both(93.95, 75.86), "537K"),
        ),
        extra=True,
    ),
    Table(
        "demo",
        "Demonstration: Table 1c in small, on the embedded digits",
        ("W_x", "W_h"),
        (
            Row(("3×3", "1×1"), "RecNet(2, 4, 8, 3, 3)", {"kernel_h": 1}),
            Row(("1×1", "3×3"), "RecNet(2, 4, 8, 3, 3)", {"kernel_x": 1}),
            Row(("3×3", "3×3"), "RecNet(2, 4, 8, 3, 3)"),
        ),
        datasets=("digits",),
        recipe="quick",
        extra=True,
    ),
)

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}
PAPER_TABLES = tuple(name for name, table in TABLES.items() if not table.extra)
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "digits": "digits"}
