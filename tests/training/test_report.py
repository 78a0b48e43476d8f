from __future__ import annotations

import base64
import dataclasses
import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recnets.data import DataSet, Split
from recnets.training import Evaluation, Recipe
from recnets.training.charts import Line, confusion_chart, line_chart, picture_uri, png_uri, ticks
from recnets.training.report import write_report

SUMMARY: dict[str, Any] = {
    "final_accuracy": 91.234, "final_top5": 100.0, "parameters": 1_234_567, "epochs": 3, "seconds": 3725.0,
    "images_per_second": 1234.5, "train_images": 70, "test_images": 30, "device": "cpu", "input_share": 0.0123,
    "command": "recnet train --model '<b>'", "commit": None, "processes": 1, "versions": {"torch": "2"},
}  # fmt: skip
HISTORY = [
    {"epoch": i + 1, "lr": 0.1 - 0.03 * i, "train_loss": 2.0 / (i + 1), "train_accuracy": 30.0 * i}
    | ({"test_loss": 2.5 / (i + 1), "test_accuracy": 25.0 * i} if i != 1 else {})
    for i in range(3)
]


class Page(HTMLParser):
    """Checks that tags nest, and collects what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "html"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag != "html":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def judged(split: Split, classes: int, predictions: Tensor) -> Evaluation:
    confusion = torch.bincount(split.labels * classes + predictions, minlength=classes**2).view(classes, classes)
    accuracy = 100 * float((predictions == split.labels).float().mean())
    confidence = torch.linspace(0.3, 0.9, len(predictions))
    return Evaluation(accuracy, 100.0, 0.5, confusion, predictions, confidence)


def page_of(path: Path) -> tuple[Page, str]:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page, " ".join(" ".join(page.words).split())


def test_the_page_shows_the_run(tmp_path: Path, stripes_data: DataSet) -> None:
    predictions = stripes_data.test.labels.clone()
    predictions[:3] = torch.tensor([1, 2, 1])  # images 0, 1, 2 are rows, columns, checks
    write_report(
        tmp_path / "r.html", Recipe(lr=0.2), stripes_data, SUMMARY, HISTORY, judged(stripes_data.test, 4, predictions)
    )
    page, text = page_of(tmp_path / "r.html")
    for shown in ("91.23", "1.23", "1:02:05", "1,234", "rows taken for columns", "3 of 30 test images are wrong"):
        assert shown in text, shown
    assert "recnet train --model '<b>'" in text  # escaped, so that it is text again
    assert "lr 0.2" in text
    assert sum(tag == "polyline" for tag, _ in page.tags) == 5
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 3
    assert not [a for tag, attrs in page.tags for a in attrs.values() if a and a.startswith(("http", "//"))]


def test_without_a_mistake_and_without_history(tmp_path: Path, stripes_data: DataSet) -> None:
    evaluation = judged(stripes_data.test, 4, stripes_data.test.labels)
    write_report(tmp_path / "r.html", Recipe(), stripes_data, SUMMARY, [], evaluation)
    assert "No mistake on the test split" in page_of(tmp_path / "r.html")[1]


def test_many_classes_become_a_picture(tmp_path: Path, stripes_data: DataSet) -> None:
    classes = [f"class {i}" for i in range(100)]
    data = dataclasses.replace(stripes_data, classes=classes)
    evaluation = judged(data.test, 100, (data.test.labels + 1) % 100)
    write_report(tmp_path / "r.html", Recipe(), data, SUMMARY, HISTORY, evaluation)
    page, text = page_of(tmp_path / "r.html")
    assert any("matrix" in (attrs.get("class") or "") for tag, attrs in page.tags if tag == "img")
    assert "The 10 hardest classes" not in text  # only four of them have images
    assert evaluation.most_confused(2) == [(0, 1, 8), (1, 2, 8)]


def decoded(uri: str) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


def test_png_comes_back() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    colour = np.random.default_rng(1).integers(0, 256, (6, 4, 3), dtype=np.uint8)
    assert np.array_equal(decoded(png_uri(grey)), grey)
    assert np.array_equal(decoded(png_uri(colour)), colour)
    image = torch.from_numpy(colour).permute(2, 0, 1)
    assert np.array_equal(decoded(picture_uri(image)), colour)
    assert np.array_equal(decoded(picture_uri(image[:1])), colour[..., 0])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.02, 0.9), (37, 99.5), (-3, 4), (5, 5), (0, 1e-9), (1, 200)])
def test_ticks_are_few_and_cover(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 8
    assert marks[0] <= low + 1e-12
    assert marks[-1] >= high - 1e-12


def test_curves_leave_gaps_out() -> None:
    chart = line_chart([Line("a", [1.0, None, float("nan"), 2.0], "test")], [1, 2, 3, 4])
    points = chart.split('points="')[1].split('"')[0].split()
    assert len(points) == 2
    assert line_chart([Line("a", [None], "test")], [1]).startswith("<p")


def test_confusion_cells_say_who_is_taken_for_whom() -> None:
    chart = confusion_chart(torch.tensor([[3, 1], [0, 4]]), ["cat & dog", "cow"])
    assert "cat &amp; dog taken for cow: 1 of 4" in chart
    assert "cow recognised: 4 of 4" in chart
