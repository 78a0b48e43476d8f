"""Accuracy of a model on a split: top-1, top-5, loss, and who is taken for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recnets.data import EpochLoader, Split
from recnets.training.distributed import Processes
from recnets.training.precision import Precision, computing


@dataclass(frozen=True)
class Evaluation:
    """Percentages are of all images. All tensors are on the CPU."""

    accuracy: float
    top5: float
    loss: float
    confusion: Tensor
    """int64 (K, K), row: the true class, column: the predicted one."""
    predictions: Tensor
    """int64 (N,), in the order of the split."""
    confidence: Tensor
    """float32 (N,), the probability of the predicted class."""

    @property
    def per_class(self) -> list[float]:
        """Percent of each class's images that are right; nan for a class without images."""
        right, total = self.confusion.diagonal().double(), self.confusion.sum(1)
        return (100 * right / total).tolist()

    def most_confused(self, count: int) -> list[tuple[int, int, int]]:
        """(true class, predicted class, images) of the most frequent mistakes, most frequent first."""
        wrong = self.confusion.clone()
        wrong.fill_diagonal_(0)
        values, places = (t[:count] for t in wrong.flatten().sort(descending=True, stable=True))
        size = len(wrong)
        pairs = zip(values.tolist(), places.tolist(), strict=True)
        return [(place // size, place % size, value) for value, place in pairs if value > 0]


class Evaluator:
    """Keeps a split on the device and evaluates models on it; several processes share the work."""

    def __init__(
        self,
        split: Split,
        num_classes: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        batch_size: int = 1000,
        precision: Precision = "fp32",
        channels_last: bool = False,
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes()
        self.size, self.num_classes, self.device = len(split), num_classes, device
        self.precision, self.channels_last = precision, channels_last
        rank, world = self.processes.rank, self.processes.world
        self.loader = EpochLoader(
            split, max(batch_size, world), mean=mean, std=std, device=device, shuffle=False, rank=rank, world=world
        )
        place = torch.arange(self.size, device=device)
        self._places = place[place % self.loader.batch_size % world == rank]

    @torch.no_grad()
    def __call__(self, model: nn.Module, watch: Callable[[int], object] = lambda images: None) -> Evaluation:
        """In eval mode; the model's own mode is put back. `watch` is told of every batch's images."""
        training = model.training
        model.eval()
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        loss = torch.zeros((), dtype=wide, device=self.device)
        within5 = torch.zeros((), dtype=torch.int64, device=self.device)
        outcome = torch.zeros(3, self.size, device=self.device)  # label, prediction, confidence
        done = 0
        try:
            for batch in self.loader.epoch(0):
                if len(batch.labels) == 0:
                    continue
                logits = self._logits(model, batch.images)
                top = logits.topk(min(5, self.num_classes), dim=1).indices
                within5 += (top == batch.labels[:, None]).sum()
                loss += functional.cross_entropy(logits, batch.labels, reduction="sum").to(wide)
                here = self._places[done : done + len(batch.labels)]
                confidence, predicted = logits.softmax(1).max(1)
                outcome[:, here] = torch.stack([batch.labels.float(), predicted.float(), confidence])
                done += len(here)
                watch(len(here))
        finally:
            model.train(training)
        for tensor in (loss, within5, outcome):
            self.processes.total(tensor)
        labels, predictions = outcome[0].long().cpu(), outcome[1].long().cpu()
        confusion = torch.bincount(labels * self.num_classes + predictions, minlength=self.num_classes**2)
        confusion = confusion.view(self.num_classes, self.num_classes)
        return Evaluation(
            accuracy=100 * int(confusion.diagonal().sum()) / self.size,
            top5=100 * int(within5) / self.size,
            loss=float(loss) / self.size,
            confusion=confusion,
            predictions=predictions,
            confidence=outcome[2].cpu(),
        )

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        inputs = self.loader.normalise(images)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with computing(self.precision, self.device):
            logits: Tensor = model(inputs)
        return logits.float()


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 1000,
    precision: Precision = "fp32",
) -> Evaluation:
    """Evaluate `model` where it is on a whole split.

    >>> data = load_dataset("cifar100")
    >>> evaluate(model, data.test, mean=data.mean, std=data.std).accuracy
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    num_classes = getattr(model, "num_classes", None)
    if not isinstance(num_classes, int):
        num_classes = int(split.labels.max()) + 1
    evaluator = Evaluator(
        split, num_classes, mean=mean, std=std, device=device, batch_size=batch_size, precision=precision
    )
    return evaluator(model)
