"""The parts of a RecNet as `optimize` writes them: folded, in channels-last order, few calls a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from recnets.deploy.live import affines, foldable, folded_stem, in_blocks, live_channels, read_channels, whole
from recnets.layers import Recurrent, Stem
from recnets.layers.norm import norm_of
from recnets.models.squeezed import SqueezedRecurrent
from recnets.ops.torch import conv

Step = Callable[[int, Tensor, Tensor | None], Tensor | None]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class FastStem(nn.Module):
    """The stem with its BN folded in; turns pictures into channels-last order."""

    weight: Tensor
    bias: Tensor

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        weight, bias = folded_stem(stem)
        self.register_buffer("weight", channels_last(weight))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(channels_last(x), self.weight, self.bias, padding=1).relu_()


class FastRecurrent(nn.Module):
    """A Recurrent module in evaluation, (N, d·s_in, H, W) -> (N, c_out, H, W) in channels-last order.

    `scale` says where a step's BN goes: "folded" has weights for every step with the BN in them (up to d times the
    memory of W_x and W_h), of the live channels only; "shared" has the weights once and scales each step's result.
    What is faster depends on how many channels are zero and on whether d copies fit the processor's caches. `mode`:
    "stream" adds h_i·A_i into a running sum, "concat" keeps all the h_i for one product.
    """

    def __init__(self, module: Recurrent, mode: str, scale: str) -> None:
        super().__init__()
        if not self.possible(module):
            layer = f"CRC({module.crc.extra_repr()}) in {module.crc.weight_h.dtype}"
            raise ValueError(f"{type(self).__name__} cannot run {layer}: {self.possible.__doc__}")
        crc = module.crc
        self.mode, self.d, self.s_in, self.s_out, self.padding_mode = mode, crc.d, crc.s_in, crc.s_out, crc.padding_mode
        weight_x, weight_h = crc.weight_x.detach(), crc.weight_h.detach()
        self.joint = weight_x.shape[-1] == weight_h.shape[-1]
        self.folded = scale == "folded"
        scales, shifts = affines(module)
        live = in_blocks(live_channels(scales, shifts, read_channels(module)))
        if not self.folded:
            live = torch.ones_like(live)
        self.counts = [int(row.sum()) for row in live]
        live = live.to(scales.device)
        self.scales = [vector[own] for vector, own in zip(scales, live, strict=True)]
        self.shifts = [vector[own] for vector, own in zip(shifts, live, strict=True)]
        self.first = channels_last(self._scaled(weight_x[live[0]], 0))
        self.weights: list[tuple[Tensor, ...]] = []
        for i in range(1, crc.d if self.folded else min(2, crc.d)):
            pair: tuple[Tensor, ...] = (weight_x[live[i]],)
            if self.counts[i - 1]:
                pair += (weight_h[live[i]][:, live[i - 1]],)
                pair = (torch.cat(pair, dim=1),) if self.joint else pair
            self.weights.append(tuple(channels_last(self._scaled(w, i)) for w in pair))
        matrix, self.start = transition_matrix(module)
        matrix = matrix[live.flatten()]
        self.matrices = [a.contiguous() for a in matrix.split(self.counts if mode == "stream" else len(matrix))]
        if not self.folded:
            self.scales = [t[:, None, None] for t in self.scales]
            self.shifts = [t[:, None, None] for t in self.shifts]

    @staticmethod
    def possible(module: Recurrent) -> bool:
        """There must be a BN or ReLU in each step of a recurrence."""
        return foldable(module)

    def _scaled(self, weight: Tensor, i: int) -> Tensor:
        return weight * self.scales[i][:, None, None, None] if self.folded else weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FastRecurrent:
        """Lists of tensors are no buffers; they move and change type with the rest all the same."""
        super()._apply(fn, recurse)
        for name in ("scales", "shifts", "matrices"):
            setattr(self, name, [fn(t) for t in getattr(self, name)])
        for name in ("first", "start"):
            setattr(self, name, fn(getattr(self, name)))
        self.weights = [tuple(fn(t) for t in pair) for pair in self.weights]
        return self

    def _step(self, i: int, x_i: Tensor, h: Tensor | None) -> Tensor | None:
        """h_i, (N, counts[i], H, W), or None if there is nothing of it."""
        if not self.counts[i]:
            return None
        bias = self.shifts[i] if self.folded else None
        weight, *other = (self.first,) if i == 0 else self.weights[i - 1 if self.folded else 0]
        if h is not None and self.joint:
            z = conv(torch.cat([x_i, h], dim=1), weight, bias, self.padding_mode)
        else:
            z = conv(channels_last(x_i), weight, bias, self.padding_mode)
            if h is not None:
                z = z.add_(conv(h, other[0], None, self.padding_mode))
        return z.relu_() if self.folded else torch.addcmul(self.shifts[i], z, self.scales[i]).relu_()

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        total = x.new_empty(n * height * width, self.start.shape[0])
        if torch.compiler.is_compiling():
            self._sum_states(total, x)
        else:
            with torch.inference_mode():  # a good part of the work otherwise is keeping books for gradients
                self._sum_states(total, x)
        return total.unflatten(0, (n, height, width)).permute(0, 3, 1, 2)

    def _states(self, x: Tensor, step: Step) -> Iterator[tuple[int, Tensor]]:
        """(i, h_i) of the steps that give something, in channels-last order; `step` computes one."""
        h: Tensor | None = None
        for i, x_i in enumerate(channels_last(x).split(self.s_in, dim=1)):
            h = step(i, x_i, h)
            if h is not None:
                yield i, h

    def _sum_states(self, total: Tensor, x: Tensor) -> None:
        """relu(Σ_i h_i·A_i + start) in `total`, (N·H·W, c_out)."""
        hidden: list[Tensor] = []
        begun = False
        for i, h in self._states(x, self._step):
            pixels = h.permute(0, 2, 3, 1).reshape(-1, self.counts[i])  # a view: h is in channels-last order
            if self.mode == "concat":
                hidden.append(pixels)
            elif begun:
                total.addmm_(pixels, self.matrices[i])
            else:
                torch.addmm(self.start, pixels, self.matrices[i], out=total)
                begun = True
        if hidden:
            torch.addmm(self.start, torch.cat(hidden, dim=1), self.matrices[0], out=total)
        total.relu_()


def transition_matrix(module: Recurrent) -> tuple[Tensor, Tensor]:
    """The transition with its BN folded in: y = relu(h·matrix + start), (d·s_out, c_out) and (c_out)."""
    scale, start = norm_of(module.transition.norm).affine()
    weight, start = whole(module.transition.conv.weight.flatten(1) * scale[:, None], start, module.transition)
    matrix = weight.detach().t()
    if isinstance(module, SqueezedRecurrent):  # a product with a few zeros is faster than picking columns
        rows = matrix.new_zeros(module.crc.d * module.crc.s_out, matrix.shape[1])
        matrix = rows.index_copy(0, module.transition.columns, matrix)
    return matrix, start.detach()
