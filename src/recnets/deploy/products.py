"""Recurrent modules whose steps are matrix products: what the ways to write them have in common."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.deploy.live import joint
from recnets.layers import Recurrent

# Pictures are taken together up to this many pixels: what is gathered of them should stay in the processor's cache.
PIXELS = 1024
# A thread takes at least this many rows of a product.
SHARE = 32


def shares(rows: int, device: torch.device) -> int:
    """In how many equal parts a product of this many rows is best written: one a thread, as a batch of products.

    Threads that share one small product wait for each other much of the time.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return math.gcd(rows, threads) if rows >= SHARE * threads else 1


# Of so many sizes a thread keeps the buffers; two threads must not write to the same.
KEPT = 12
_here = threading.local()


def _kept(build: Callable[..., Any], sizes: tuple[Any, ...]) -> Any:
    """`build(*sizes)` of this thread, made anew where it is not among the last used."""
    spaces: dict[Any, Any] = _here.__dict__.setdefault("spaces", {})
    key = (build, sizes)
    spaces[key] = spaces.pop(key) if key in spaces else build(*sizes)
    if len(spaces) > KEPT:
        del spaces[next(iter(spaces))]
    return spaces[key]


class ProductRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "stream" by matrix products; subclasses say how.

    A step's BN scales its result: a product that starts from a vector of shifts takes longer, and weights for every
    step would not fit the caches.
    """

    def __init__(self, module: Recurrent) -> None:
        super().__init__(module, "stream", "shared")
        self.scales, self.shifts = ([v.flatten() for v in vectors] for vectors in (self.scales, self.shifts))

    @staticmethod
    def possible(module: Recurrent) -> bool:
        """There must be two steps, a BN or ReLU in each, kernels of one size, and zeros around the map."""
        return joint(module) and module.crc.d > 1

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        some = max(1, PIXELS // (height * width))
        x = channels_last(x)
        if n == 0:
            return x.new_empty(0, self.start.shape[0], height, width)
        if n > some:
            return channels_last(torch.cat([self._some(part) for part in x.split(some)]))
        return self._some(x)

    def _some(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        y = x.new_empty(n, height, self._computed(width), self.start.shape[0])
        with torch.inference_mode():  # a good part of the work otherwise is keeping books for gradients
            sums = self._sums(x)
            torch.add(sums, self.start, out=y.view(sums.shape)).relu_()
        return channels_last(y.narrow(2, 0, width).permute(0, 3, 1, 2))

    def _computed(self, width: int) -> int:
        """How many pixels of a line are computed."""
        return width

    def _sums(self, x: Tensor) -> Tensor:
        """Σ_i h_i·A_i, (N, H, …, c_out) with a line's pixels in order, in memory that the next call writes over."""
        raise NotImplementedError

    def _space(self, build: Callable[..., Any], x: Tensor, *key: Any) -> Any:
        """`build`'s buffers and views for maps like x.

        Making them takes a while, so for small maps on a CPU they are kept. Not on a GPU, where two streams could write
        to the same, nor while a compiler or an export looks on, whose tensors hold nothing.
        """
        n, _, height, width = x.shape
        sizes = (n, height, width, self.s_in, self.s_out, self.start.shape[0], *key, x.dtype, x.device)
        real = type(x) is Tensor and not torch.compiler.is_compiling()
        if not real or x.device.type != "cpu" or n * height * width > PIXELS:
            return build(*sizes)
        return _kept(build, (*sizes, torch.get_num_threads()))

    def _matrices(self, parts: int) -> list[Tensor]:
        """The A_i, for a product in so many parts."""
        return [a.expand(parts, -1, -1) for a in self.matrices]
