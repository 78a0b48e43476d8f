"""A RecNet unrolled into plain convolutions, as exporters and other runtimes want it.

No step changes a tensor in place and no shape depends on the batch. W_x and W_h stay single tensors however often
they are used, so a file holds them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from recnets.deploy.live import affines, foldable, folded_stem, frozen, in_blocks, live_channels, read_channels
from recnets.layers import Recurrent, Stem
from recnets.layers.norm import norm_of
from recnets.models import RecNet
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
        weight, bias = folded_stem(stem)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.conv2d(x, self.weight, self.bias, padding=1))


class UnrolledRecurrent(nn.Module):
    """A Recurrent module in evaluation, (N, d·s_in, H, W) -> (N, c_out, H, W).

    `scale` says where a step's BN is applied: to the "weights" (h_i = relu(x_i ⊛ s_i·W_x + h_{i-1} ⊛ s_i·W_h + t_i);
    a runtime multiplies them once, when it loads the file, which holds W_x and W_h once) or to the
    "states" (h_i = relu(s_i·(x_i ⊛ W_x + h_{i-1} ⊛ W_h) + t_i); no copies in memory either, more work a step).

    With "weights" a step computes its live channels only, from those of the step before: a runtime that multiplies W_x
    and W_h anyway picks their rows and columns too, by indices in the file. `computed(i)` tells which they are, in
    `scale_i` and `shift_i` as well; with "states" they are all.
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
        scales, shifts = affines(module)
        read = read_channels(module)
        live = live_channels(scales, shifts, read)
        folded = scale == "weights"
        computed = in_blocks(live) if folded else torch.ones_like(live)
        self.widths = [int(row.sum()) for row in computed]
        for i, own in enumerate(computed):
            indices = own.nonzero().flatten().to(scales.device)
            self.register_buffer(f"channels_{i}", None if own.all() else indices)
            self.register_buffer(f"scale_{i}", scales[i, indices].reshape((-1, 1, 1, 1) if folded else (-1, 1, 1)))
            self.register_buffer(f"shift_{i}", shifts[i, indices] if folded else shifts[i].reshape(-1, 1, 1))
        self._read_transition(module, computed, read, read & live if folded else read)

    def _read_transition(self, module: Recurrent, computed: Tensor, read: Tensor, used: Tensor) -> None:
        """The columns of what is used of the states, out of those of what is `read`, and where they belong."""
        factor, start = norm_of(module.transition.norm).affine()
        matrix = (module.transition.conv.weight * factor[:, None, None, None]).detach()
        matrix = matrix[:, used[read].to(matrix.device)]
        self.expand = module.transition.expand if isinstance(module, SqueezedRecurrent) else nn.Identity()
        self.register_buffer("start", start.detach())
        self.register_buffer("nothing", torch.zeros_like(matrix[:, :1]))
        masks = [mask[own] for mask, own in zip(used, computed, strict=True)]
        self.counts = [int(mask.sum()) for mask in masks]  # a state that gives nothing is left out
        if self.concat:
            given = [mask for mask, count in zip(masks, self.counts, strict=True) if count]
            self._keep("", matrix, torch.cat(given))
        for i, (mask, part) in enumerate(zip(masks, matrix.split(self.counts, dim=1), strict=True)):
            self._keep(f"_{i}", None if self.concat else part.contiguous(), mask)

    def _keep(self, name: str, matrix: Tensor | None, mask: Tensor) -> None:
        """`matrix` has columns for the channels in `mask`.

        With "weights" the others get a column of zeros, the last: `columns` tells where each is. With "states" it is
        the states of which only those in `kept` are read.
        """
        columns, kept = torch.where(mask, mask.cumsum(0) - 1, mask.sum()), mask.nonzero().flatten()
        folded, device = self.scale == "weights", self.start.device
        self.register_buffer(f"matrix{name}", matrix)
        self.register_buffer(f"columns{name}", columns.to(device) if folded and not mask.all() else None)
        self.register_buffer(f"kept{name}", None if folded or mask.all() else kept.to(device))

    def matrix_of(self, name: str) -> Tensor:
        """A matrix, for all the channels that are computed."""
        matrix, columns = getattr(self, f"matrix{name}"), getattr(self, f"columns{name}")
        return matrix if columns is None else torch.cat([matrix, self.nothing], dim=1).index_select(1, columns)

    def computed(self, i: int) -> Tensor:
        """The channels of h_i that are computed."""
        channels: Tensor | None = getattr(self, f"channels_{i}")
        return torch.arange(self.s_out, device=self.start.device) if channels is None else channels

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

        Each is (N, widths[i], H, W), or None if it has no channel that is not zero.
        """
        h: Tensor | None = None
        for i, x_i in enumerate(torch.split(x, self.s_in, dim=1)):
            h = self._step(i, x_i, h) if self.widths[i] else None
            yield h

    def transition(self, hidden: Iterable[Tensor | None]) -> Tensor:
        """relu(Σ_i h_i ⊛ A_i + start), by one convolution or a running sum."""
        total: Tensor | None = None
        wide: list[Tensor] = []
        for i, h in enumerate(hidden):
            if h is None or not self.counts[i]:
                continue
            kept = getattr(self, f"kept_{i}")
            read = h if kept is None else h.index_select(1, kept)
            if self.concat:
                wide.append(read)
            elif total is None:
                total = torch.conv2d(read, self.matrix_of(f"_{i}"), self.start)
            else:
                total = torch.conv2d(read, self.matrix_of(f"_{i}")) + total
        if total is None:
            total = torch.conv2d(torch.cat(wide, dim=1), self.matrix_of(""), self.start)
        return self.expand(torch.relu(total))

    def forward(self, x: Tensor) -> Tensor:
        return self.transition(self.states(x))


class Unrolled(nn.Module):
    """A RecNet for other runtimes: (N, C, H, W) -> logits."""

    def __init__(self, model: RecNet, transition: str, scale: str) -> None:
        super().__init__()
        choose(transition, TRANSITIONS, "transition")
        choose(scale, SCALES, "scale")
        model = frozen(model)  # parts of it go into this module, whose mode is not the caller's
        self.stem = UnrolledStem(model.stem)
        self.stages = nn.ModuleList()
        for stage in model.stages:
            modules = [unroll(module, transition, scale) for module in stage.children()]
            self.stages.append(nn.Sequential(*modules))
        self.pool = model.pool
        self.classifier = model.classifier
        self.in_channels = model.in_channels
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            x = stage(self.pool(x) if i else x)
        return self.classifier(x.mean(dim=(2, 3)))


def unroll(module: nn.Module, transition: str, scale: str) -> nn.Module:
    """The module's unrolled form. Variants without a folded step (linear, grouped) are refused."""
    assert isinstance(module, Recurrent)
    crc = module.crc
    if not foldable(module):
        what = f"nonlinearity={crc.nonlinearity!r}, recurrent={crc.recurrent}"
        raise ValueError(f"a RecNet is exported with a BN or ReLU in each step of a recurrence, this one has {what}")
    return UnrolledRecurrent(module, transition, scale)


__all__ = ["SCALES", "TRANSITIONS", "Unrolled", "UnrolledRecurrent", "UnrolledStem"]
