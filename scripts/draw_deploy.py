"""Draws accuracy against latency and against file size on the CPU, from what `recnet bench --out` wrote.

    python scripts/draw_deploy.py benchmarks/results/latency-cpu-….csv benchmarks/results/deployed-….csv

Writes docs/img/deploy-latency and docs/img/deploy-size, each as .svg and .png, and prints for each accuracy the fastest
and the smallest network. Hollow points are untrained networks with the paper's accuracy, CIFAR-100. Filled ones are
files of published weights, float32, squeezed and 8 bits, each with the accuracy of its own by `benchmarks/deployed.py`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from recnets.deploy.bench import INT8, SQUEEZED
from recnets.experiments.figure import draw_figure
from recnets.experiments.paper import TABLES
from recnets.experiments.points import FIGURE_TABLES, Axis, Point
from recnets.models import model_info

OUT = Path(__file__).resolve().parents[1] / "docs" / "img"
OTHER_FORMS = {"squeezed": SQUEEZED, "8 bits": INT8}
AXES = (
    Axis(
        "latency",
        "Time of one 32×32 picture on 2 CPU cores, best run of the fastest file, float32 unless said (ms)",
        "ms",
        paper_own=True,
    ),
    Axis("size", "ONNX file, float32 unless said (MB)", "MB", paper_own=True),
)


def read(path: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Rows of the CSV by model and way, the fastest of those that were timed several times."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with path.open(encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: -float(row["best_ms"]))
    for row in rows:
        found.setdefault(row["model"], {})[row["way"]] = row
    return found


def exported(ways: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """The rows of float32 files in other runtimes, of the network as it is."""
    other = OTHER_FORMS.values()
    return [row for way, row in ways.items() if way.startswith(("ONNX", "OpenVINO")) and way not in other]


def points(found: dict[str, dict[str, dict[str, str]]]) -> list[Point]:
    """One a network that the paper gives an accuracy for. 8-bit files are left out: their accuracy is their own."""
    accuracy = {row.model: row.accuracy["cifar100"] for t in FIGURE_TABLES for row in TABLES[t].rows}
    made = []
    for model, ways in found.items():
        if model not in accuracy:
            continue
        info = model_info(model)
        files = [row for row in exported(ways) if row["way"].startswith("ONNX")]
        place = {
            "latency": min(float(row["best_ms"]) for row in exported(ways)),
            "size": min(int(row["file_bytes"]) for row in files) / 1e6,
        }
        made.append(Point(info.title, info.family, accuracy[model], None, {}, place))
    return made


def deployed(path: Path, found: dict[str, dict[str, dict[str, str]]]) -> list[Point]:
    """One a file of published weights, with its latency where that was measured."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    made = []
    for row in rows:
        info = model_info(row["model"].split(".")[0])
        title = info.title if row["form"] == "float32" else f"{info.title}, {row['form']}"
        place = {"size": int(row["bytes"]) / 1e6}
        ways = found.get(row["model"], {})
        other = OTHER_FORMS.get(row["form"])
        timed = exported(ways) if other is None else [ways[other]] if other in ways else []
        if timed:
            place["latency"] = min(float(way["best_ms"]) for way in timed)
        made.append(Point(title, info.family, None, float(row["accuracy"]), place, {}))
    return made


def frontier(shown: list[Point], axis: str) -> list[Point]:
    """Networks that no other beats in both accuracy and the axis, from the most accurate down."""
    best: list[Point] = []
    for point in sorted(shown, key=lambda p: (-(p.paper or 0), p.paper_x[axis])):
        if not best or point.paper_x[axis] < best[-1].paper_x[axis]:
            best.append(point)
    return best


def main(path: Path, files: Path) -> None:
    found = read(path)
    shown, ours = points(found), deployed(files, found)
    for axis, best in zip(AXES, ("fastest", "smallest"), strict=True):
        title = f"CIFAR-100 accuracy and {axis.name} of exported networks"
        drawn = shown + [point for point in ours if axis.name in point.x]
        for written in draw_figure(drawn, axis, OUT / f"deploy-{axis.name}", title):
            print(f"wrote {written.relative_to(OUT.parents[1])}")
        print(f"{best} at its accuracy, CIFAR-100 in the paper:")
        for point in frontier(shown, axis.name):
            print(f"  {point.paper:.2f} %  {point.paper_x[axis.name]:6.2f} {axis.unit}  {point.title}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
