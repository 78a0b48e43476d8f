"""Did a change keep what a model says? Two models on the same pictures, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recnets.data import Normalise, Split, normalisation_of

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Comparison:
    """`before` and `after` on the same pictures. Accuracies in percent, None without labels."""

    images: int
    difference: float
    changed: int
    accuracy_before: float | None
    accuracy_after: float | None

    def __str__(self) -> str:
        text = f"{self.images:,} pictures: {self.changed:,} predictions changed, logits moved by at most "
        text += f"{self.difference:.2g}"
        if self.accuracy_before is not None:
            text += f", accuracy {self.accuracy_before:.2f} % -> {self.accuracy_after:.2f} %"
        return text


def normalise(images: Tensor, metadata: dict[str, Any]) -> Tensor:
    """uint8 (N, C, H, W) -> float32, by the weights' own mean and standard deviation."""
    return Normalise(*normalisation_of(metadata))(images)


@torch.no_grad()
def compare(
    before: Network, after: Network, split: Split, metadata: dict[str, Any], images: int, batch: int = 250
) -> Comparison:
    """Both networks on the first `images` pictures of a split."""
    pictures, labels = split.images[:images], split.labels[:images]
    difference, changed, right_before, right_after = 0.0, 0, 0, 0
    for start in range(0, len(pictures), batch):
        x = normalise(pictures[start : start + batch], metadata)
        truth = labels[start : start + batch]
        a, b = before(x), after(x)
        difference = max(difference, float((a - b).abs().max()))
        changed += int((a.argmax(1) != b.argmax(1)).sum())
        right_before += int((a.argmax(1) == truth).sum())
        right_after += int((b.argmax(1) == truth).sum())
    count = len(pictures)
    return Comparison(count, difference, changed, 100 * right_before / count, 100 * right_after / count)
