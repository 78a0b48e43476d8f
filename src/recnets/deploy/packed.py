"""A Recurrent module as oneDNN's convolutions, their weights laid out in advance as the processor wants them.

An ordinary convolution of one picture spends as long on rearranging its weights as on multiplying. Here that is done
once, and a step is two calls: [x_i, h_{i-1}] side by side, then their convolution with the step's BN and ReLU in it.
The operators are those to which `torch.compile` turns convolutions on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recnets.deploy.fast import FastRecurrent, channels_last
from recnets.deploy.live import joint
from recnets.layers import Recurrent
from recnets.ops.torch import count_flops_of, onednn_takes

ONE = (1, 1)


AVAILABLE = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_convolution_weight", "_convolution_pointwise"))
"""Does this build of PyTorch have the operators?"""
if AVAILABLE:
    count_flops_of(torch.ops.mkldnn._convolution_pointwise)


def _radius(weight: Tensor) -> tuple[int, int]:
    return weight.shape[2] // 2, weight.shape[3] // 2


def pack(weight: Tensor, height: int, width: int) -> Tensor:
    """(C_out, C_in, k, k) in the order that suits one map of height×width; other maps take it too, if slower."""
    size = [1, weight.shape[1], height, width]
    return torch.ops.mkldnn._reorder_convolution_weight(weight, _radius(weight), ONE, ONE, 1, size)


def convolve(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """relu(x ⊛ weight + bias) of a packed weight."""
    return torch.ops.mkldnn._convolution_pointwise(x, packed, bias, _radius(packed), ONE, ONE, 1, "relu", [], "")


class PackedRecurrent(FastRecurrent):
    """`FastRecurrent` in mode "concat" with folded weights, packed.

    The weights are kept in the usual order too, so they take twice the memory of folded ones: what a compiler or an
    export looks at, and what moved to another device or type, runs with those.
    """

    def __init__(self, module: Recurrent, height: int, width: int) -> None:
        super().__init__(module, "concat", "folded")
        self.size = (height, width)
        self._pack()

    @staticmethod
    def possible(module: Recurrent) -> bool:
        """There must be a BN or ReLU a step, kernels of one size, zeros around the map, float32 on a CPU and oneDNN."""
        return joint(module) and AVAILABLE and onednn_takes(module.crc.weight_h)

    def _pack(self) -> None:
        matrix = self.matrices[0].t()[:, :, None, None].contiguous()
        weights = [self.first, *(w for (w,) in self.weights), matrix]
        self.packed = [pack(w, *self.size) if len(w) else w for w in weights] if onednn_takes(self.first) else []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedRecurrent:
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A packed weight cannot be copied or pickled."""
        return {**self.__dict__, "packed": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def _runs_packed(self, x: Tensor) -> bool:
        return bool(self.packed) and onednn_takes(x)

    def _packed_step(self, i: int, x_i: Tensor, h: Tensor | None) -> Tensor | None:
        """As `_step`."""
        if not self.counts[i]:
            return None
        return convolve(channels_last(x_i) if h is None else torch.cat([x_i, h], 1), self.packed[i], self.shifts[i])

    def forward(self, x: Tensor) -> Tensor:
        if not self._runs_packed(x):
            return super().forward(x)
        with torch.inference_mode():  # a good part of the work otherwise is keeping books for gradients
            wide = torch.cat([h for _, h in self._states(x, self._packed_step)], dim=1)
        with torch.no_grad():
            return convolve(wide, self.packed[-1], self.start)
