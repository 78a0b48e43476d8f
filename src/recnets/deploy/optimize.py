"""`optimize`: a trained model made fast for inference in plain PyTorch, on the CPU first of all.

What costs time at batch 1 is not arithmetic: a step of a CRC layer as plain modules is five calls (two convolutions,
an addition, BN, ReLU), with a change of memory order around each convolution. Here a step is one convolution of
[x_i, h_{i-1}] with [W_x, W_h] in channels-last order, with folded weights of the channels alone that are not zero
anyway, or one matrix product; the transition's sum is a matrix product too.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

from recnets.deploy.columns import ColumnRecurrent
from recnets.deploy.fast import FastRecurrent, FastStem
from recnets.deploy.live import foldable, frozen
from recnets.deploy.packed import PackedRecurrent
from recnets.deploy.winograd import WinogradRecurrent
from recnets.layers import Recurrent
from recnets.models import RecNet
from recnets.models.profile import check_image_size
from recnets.utils import choose

MODES = ("auto", "stream", "concat", "packed", "columns", "rows", "winograd")
PRODUCTS = ("columns", "rows", "winograd")
EAGER = ("packed", *PRODUCTS)
"""Modes with one way to scale, and none for a compiler."""
SCALES = ("auto", "folded", "shared")
ROUNDS = 15


def written(module: Recurrent, mode: str, scale: str, size: tuple[int, int]) -> FastRecurrent:
    """The module in one of the ways to run it on maps of `size`; what cannot be written so streams."""
    if mode == "packed" and PackedRecurrent.possible(module):
        return PackedRecurrent(module, *size)
    if mode == "winograd" and WinogradRecurrent.possible(module):
        return WinogradRecurrent(module)
    if mode in PRODUCTS and ColumnRecurrent.possible(module):
        return ColumnRecurrent(module, "rows" if mode == "winograd" else mode)
    return FastRecurrent(module, "stream" if mode in EAGER else mode, scale)


def _possible(module: Recurrent, mode: str) -> bool:
    if mode == "packed":
        return PackedRecurrent.possible(module)
    return WinogradRecurrent.possible(module) if mode == "winograd" else ColumnRecurrent.possible(module)


def _fastest(module: Recurrent, x: Tensor, modes: list[str], scales: list[str]) -> FastRecurrent:
    """The fastest of the ways to run a module on this machine, by the best of interleaved runs.

    Another program slows the runs that it meets, and the median where it meets most.
    """
    pairs = itertools.product(modes, scales)
    size = (x.shape[2], x.shape[3])
    ways = [
        written(module, mode, scale, size)
        for mode, scale in pairs
        if mode not in EAGER or (scale == scales[0] and (len(modes) == 1 or _possible(module, mode)))
    ]
    if len(ways) == 1:
        return ways[0]
    seconds: list[list[float]] = [[] for _ in ways]
    for round_ in range(ROUNDS + 1):
        for way, taken in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way(x)
            if round_:  # the first run chooses kernels
                taken.append(time.perf_counter() - start)
    best = [min(taken) for taken in seconds]
    return ways[best.index(min(best))]


def optimize(
    model: nn.Module,
    *,
    image_size: int | tuple[int, int] = 32,
    mode: str = "auto",
    scale: str = "auto",
    compile: bool = False,
    **compile_options: Any,
) -> nn.Module:
    """A copy of `model` that only infers, and faster: folded, channels-last, one convolution or product a step.

    Args:
        model: a RecNet, or any other model of this package (which gets channels-last order only). It stays as it is.
        image_size: the pictures for which the ways to run a layer are timed; any other size works too.
        mode: "stream" or "concat" (convolutions), "packed" (the same with weights laid out for `image_size`, see
            `PackedRecurrent`), "columns" or "rows" (matrix products, see `ColumnRecurrent`), "winograd" (fewer of them,
            see `WinogradRecurrent`), or "auto" for what is fastest in each layer on this machine. A compiler takes the
            first two.
        scale: for "stream" and "concat", "folded", "shared" or "auto" likewise; see `FastRecurrent`. "folded" with d
            large costs memory, and "packed" twice as much.
        compile: also `torch.compile` it, with `compile_options`.

    The outputs are those of `model.eval()` to float32 rounding.
    """
    choose(mode, MODES, "mode")
    if compile and mode in EAGER:
        raise ValueError(f"compile=True goes with mode 'auto', 'stream' or 'concat', got {mode!r}")
    choose(scale, SCALES, "scale")
    fast = frozen(model)
    if isinstance(fast, RecNet):
        size = check_image_size(fast, image_size)
        modes = list(MODES[1:3] if compile else MODES[1:]) if mode == "auto" else [mode]
        scales = ["folded", "shared"] if scale == "auto" else [scale]
        reference = fast.stem.conv.weight
        with torch.inference_mode(False), torch.no_grad():
            x = torch.zeros(1, fast.in_channels, *size, dtype=reference.dtype, device=reference.device)
            fast.stem = FastStem(fast.stem)  # type: ignore[assignment]
            x = fast.stem(x)
            for i, stage in enumerate(fast.stages):
                x = fast.pool(x) if i else x
                for name, module in stage.named_children():
                    if isinstance(module, Recurrent) and foldable(module):
                        module = _fastest(module, x, modes, scales)
                        setattr(stage, name, module)
                    x = module(x)
    fast = fast.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return torch.compile(fast, **compile_options) if compile else fast  # type: ignore[return-value]
