"""What a step minimises: cross-entropy, with optional smoothing, mixed labels and a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recnets.training.distill import distillation_loss


@dataclass
class Objective:
    """Mean loss over a batch of logits (n, K).

    labels: (n,); share: how much of each image is its own after mixing (None without mixing); images: what the
    model saw, for the teacher to see the same.
    """

    label_smoothing: float = 0.0
    teacher: nn.Module | None = None
    weight: float = 0.5
    temperature: float = 4.0

    def __call__(self, logits: Tensor, labels: Tensor, images: Tensor, share: Tensor | None) -> Tensor:
        logits = logits.float()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        if share is not None:
            other = functional.cross_entropy(logits, labels.flip(0), label_smoothing=self.label_smoothing)
            loss = share * loss + (1 - share) * other
        if self.teacher is not None:
            with torch.no_grad():
                targets = self.teacher(images).float()
            soft = distillation_loss(logits, targets, self.temperature)
            loss = (1 - self.weight) * loss + self.weight * soft
        return loss
