"""A running average of a model's weights, updated on the device without waiting for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage:
    """shadow += w · (weights − shadow) after each step, w = max(1 − decay, 9 / (10 + t)).

    The second term lets the average follow the weights in the first steps instead of remembering the random
    initial ones. Floating-point buffers (BN statistics) are averaged likewise, counters copied. Everything is
    in place and `w` is computed on the device, so the update can sit inside a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay
        source, target = model.state_dict(), self.model.state_dict()
        names = [n for n, t in source.items() if t.is_floating_point()]
        # state_dict() tensors share storage with the modules' own, which are only ever written in place.
        self._source: list[Tensor] = [source[n] for n in names]
        self._target: list[Tensor] = [target[n] for n in names]
        self._counters = [(source[n], target[n]) for n in source if n not in set(names)]
        device = self._source[0].device
        self.updates = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self) -> None:
        weight = (9.0 / (10.0 + self.updates)).clamp(min=1.0 - self.decay)
        self.updates += 1
        delta = torch._foreach_sub(self._source, self._target)
        torch._foreach_mul_(delta, weight)
        torch._foreach_add_(self._target, delta)
        for source, target in self._counters:
            target.copy_(source)

    def tensors(self) -> list[Tensor]:
        """Everything that an update changes."""
        return [*self._target, *(target for _, target in self._counters), self.updates]
