"""A RecNet unrolled into plain convolutions, as exporters and other runtimes want it.

No step changes a tensor in place and no shape depends on the batch. W_x and W_h stay single tensors however often
they are used, so a file holds them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from recnets.deploy.live import live_channels, read_channels, step_affines, whole
from recnets.layers import Recurrent
from recnets.layers.norm import norm_of
from recnets.models import RecNet
from recnets.models.recnet import Stem
from recnets.models.squeezed import SqueezedRecurrent
from recnets.ops.torch import conv
from recnets.utils import choose

TRANSITIONS = ("stream", "concat")
SCALES = ("weights", "states")


class UnrolledStem(nn.Module):
    """The stem with its BN folded in."""

    weight: Tensor
    bias: Tensor

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        scale, shift = norm_of(stem.norm).affine()
        own = 0 if stem.conv.bias is None else stem.conv.bias * scale
        weight, bias = whole(stem.conv.weight * scale[:, None, None, None], shift + own, stem)
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.conv2d(x, self.weight, self.bias, padding=1))


class UnrolledRecurrent(nn.Module):
    """A Recurrent module in evaluation, (N, d·s_in, H, W) -> (N, c_out, H, W).

    `scale` says where a step's BN is applied: to the "weights" (h_i = relu(x_i ⊛ s_i·W_x + h_{i-1} ⊛ s_i·W_h + t_i);
    a runtime multiplies them once, when it loads the file, which holds W_x, W_h and the vectors s_i only) or to the
    "states" (h_i = relu(s_i·(x_i ⊛ W_x + h_{i-1} ⊛ W_h) + t_i); no copies in memory either, more work a step).

    With "weights" a step computes its live channels only, from those of the step before: a runtime that multiplies W_x
    and W_h anyway picks their rows and columns too. `channels[i]` tells which they are, in `scale_i` and `shift_i` as
    well; with "states" they are all.
    """

    weight_x: Tensor
    weight_h: Tensor
    start: Tensor
    nothing: Tensor

    def __init__(self, module: Recurrent, transition: str, scale: str) -> None:
        super().__init__()
        crc = module.crc
        self.d, self.s_in, self.s_out, self.padding_mode = crc.d, crc.s_in, crc.s_out, crc.padding_mode
        self.scale, self.concat = scale, transition == "concat"
        self.register_buffer("weight_x", crc.weight_x.detach())
        self.register_buffer("weight_h", crc.weight_h.detach())
        scales, shifts = step_affines(module)
        folded = scale == "weights"
        computed = live_channels(module) if folded else torch.ones_like(scales, dtype=torch.bool)
        self.channels = [row.nonzero().flatten() for row in computed]
        for i, own in enumerate(self.channels):
            self.register_buffer(f"channels_{i}", None if len(own) == crc.s_out else own)
            self.register_buffer(f"scale_{i}", scales[i, own].reshape((-1, 1, 1, 1) if folded else (-1, 1, 1)))
            self.register_buffer(f"shift_{i}", shifts[i, own] if folded else shifts[i].reshape(-1, 1, 1))
        self._read_transition(module, computed)

    def _read_transition(self, module: Recurrent, computed: Tensor) -> None:
        """The columns of what is computed and read, and where they belong."""
        factor, start = norm_of(module.transition.norm).affine()
        matrix = (module.transition.conv.weight * factor[:, None, None, None]).detach()
        self.expand = module.transition.expand if isinstance(module, SqueezedRecurrent) else nn.Identity()
        self.register_buffer("start", start.detach())
        self.register_buffer("nothing", torch.zeros_like(matrix[:, :1]))
        read = read_channels(module)
        live = read & computed if self.scale == "states" else read & live_channels(module, 1)
        matrix, read = matrix[:, live[read]], live
        # Of each state, which of its computed channels are read; a state that gives nothing is left out.
        masks = [mask[own] for mask, own in zip(read, computed, strict=True)]
        self.counts = [int(mask.sum()) for mask in masks]
        if self.concat and self.scale == "weights":
            self._keep("", matrix, torch.cat([mask for mask, count in zip(masks, self.counts, strict=True) if count]))
            return
        self.register_buffer("matrix", matrix if self.concat else None)
        for i, (mask, part) in enumerate(zip(masks, matrix.split(self.counts, dim=1), strict=True)):
            self._keep(f"_{i}", None if self.concat else part.contiguous(), mask)

    def _keep(self, name: str, matrix: Tensor | None, mask: Tensor) -> None:
        """`matrix` has columns for a part of the channels; with "weights" others get a column of zeros, its last."""
        places = mask.nonzero().flatten()
        if self.scale == "weights":
            places = torch.where(mask, mask.cumsum(0) - 1, mask.sum())
        self.register_buffer(f"matrix{name}", matrix)
        self.register_buffer(f"places{name}", None if mask.all() else places)

    def matrix_of(self, name: str) -> tuple[Tensor, Tensor]:
        """A matrix, for what is computed, and the transition's bias."""
        matrix, places = getattr(self, f"matrix{name}"), getattr(self, f"places{name}", None)
        if self.scale == "states":
            return matrix, self.start
        if places is not None:
            matrix = torch.cat([matrix, self.nothing], dim=1).index_select(1, places)
        return whole(matrix, self.start, self)

    def _weights(self, i: int) -> tuple[Tensor, Tensor]:
        """W_x and W_h as step i uses them, and the step before makes their inputs."""
        rows, columns = (getattr(self, f"channels_{j}") if j >= 0 else None for j in (i, i - 1))
        weights = [self.weight_x, self.weight_h]
        if rows is not None:
            weights = [w.index_select(0, rows) for w in weights]
        if columns is not None:
            weights[1] = weights[1].index_select(1, columns)
        return weights[0], weights[1]

    def _step(self, i: int, x_i: Tensor, h: Tensor | None) -> Tensor:
        scale, shift = getattr(self, f"scale_{i}"), getattr(self, f"shift_{i}")
        weight_x, weight_h = self._weights(i)
        if self.scale == "weights":
            z = conv(x_i, weight_x * scale, shift, self.padding_mode)
            return torch.relu(z if h is None else conv(h, weight_h * scale, None, self.padding_mode) + z)
        z = conv(x_i, weight_x, None, self.padding_mode)
        if h is not None:
            z = conv(h, weight_h, None, self.padding_mode) + z
        return torch.relu(z * scale + shift)

    def states(self, x: Tensor) -> Iterator[Tensor | None]:
        """h_0 … h_{d-1}, made when asked for: a streamed graph holds them in that order.

        Each is (N, len(channels[i]), H, W), or None if it has no channel that is not zero.
        """
        h: Tensor | None = None
        for i, x_i in enumerate(torch.split(x, self.s_in, dim=1)):
            h = self._step(i, x_i, h) if len(self.channels[i]) else None
            yield h

    def transition(self, hidden: Iterable[Tensor | None]) -> Tensor:
        """relu(Σ_i h_i ⊛ A_i + start), by one convolution or a running sum."""
        total: Tensor | None = None
        wide: list[Tensor] = []
        for i, h in enumerate(hidden):
            if h is None or not self.counts[i]:
                continue
            places = getattr(self, f"places_{i}", None)
            read = h if places is None or self.scale == "weights" else h.index_select(1, places)
            if self.concat:
                wide.append(read)
                continue
            matrix, start = self.matrix_of(f"_{i}")
            total = torch.conv2d(read, matrix, start) if total is None else torch.conv2d(read, matrix) + total
        if total is None:
            total = torch.conv2d(torch.cat(wide, dim=1), *self.matrix_of(""))
        y = torch.relu(total)
        return self.expand(y) if self.scale == "states" else y

    def forward(self, x: Tensor) -> Tensor:
        return self.transition(self.states(x))


class Unrolled(nn.Module):
    """A RecNet for other runtimes: (N, C, H, W) -> logits."""

    def __init__(self, model: RecNet, transition: str, scale: str) -> None:
        super().__init__()
        choose(transition, TRANSITIONS, "transition")
        choose(scale, SCALES, "scale")
        self.stem = UnrolledStem(model.stem)
        self.stages = nn.ModuleList()
        for stage in model.stages:
            modules = [unroll(module, transition, scale) for module in stage.children()]
            self.stages.append(nn.Sequential(*modules))
        self.pool = model.pool
        self.classifier = model.classifier
        self.in_channels = model.in_channels
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            x = stage(self.pool(x) if i else x)
        return self.classifier(x.mean(dim=(2, 3)))


def unroll(module: nn.Module, transition: str, scale: str) -> nn.Module:
    """The module's unrolled form. Variants without a folded step (linear, grouped) are refused."""
    assert isinstance(module, Recurrent)
    crc = module.crc
    if crc.nonlinearity == "linear" or not crc.recurrent:
        what = f"nonlinearity={crc.nonlinearity!r}, recurrent={crc.recurrent}"
        raise ValueError(f"a RecNet is exported with a BN or ReLU in each step of a recurrence, this one has {what}")
    return UnrolledRecurrent(module, transition, scale)


__all__ = ["SCALES", "TRANSITIONS", "Unrolled", "UnrolledRecurrent", "UnrolledStem"]
