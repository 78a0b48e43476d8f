"""How much of a step the input pipeline takes: CUDA events on a GPU, the clock elsewhere. Never waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Call `mark` before the batch is fetched, after it, and after the step; `read` once an epoch."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._spare: list[Any] = []

    def mark(self) -> None:
        if not self.cuda:
            self._marks.append(time.perf_counter())
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    @property
    def steps(self) -> int:
        """Whole steps since the last reading."""
        return len(self._marks) // 3

    def read(self) -> tuple[float, float]:
        """Seconds of (input, whole steps) since the last reading. The device must have been waited for."""
        triples = [self._marks[i : i + 3] for i in range(0, len(self._marks) - 2, 3)]
        fetched = sum(self._between(a, b) for a, b, _ in triples)
        whole = sum(self._between(a, c) for a, _, c in triples)
        if self.cuda:
            self._spare += self._marks
        self._marks = []
        return fetched, whole

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self.cuda else end - start


def normalise_seconds(
    normalise: Callable[[Tensor], Tensor], images: Tensor, *, graph: bool = False, repeats: int = 20
) -> float:
    """Time of one normalisation. It happens inside the step, recorded with it, but belongs to the input.

    With `graph` the repeats are replayed as a CUDA graph, as in a recorded step: launched one by one, kernels this
    small would be timed by how fast Python launches them.
    """

    def work() -> None:
        for _ in range(repeats):
            normalise(images)

    watch = Stopwatch(images.device)
    normalise(images)
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            work()
        work = recorded.replay
        work()  # the first replay uploads the graph
    watch.mark()
    watch.mark()
    work()
    watch.mark()
    if watch.cuda:
        torch.cuda.synchronize(images.device)
    return watch.read()[1] / repeats
