"""A RecNet unrolled into plain convolutions, as exporters and other runtimes want it.

No step changes a tensor in place and no shape depends on the batch. W_x and W_h stay single tensors however often
they are used, so a file holds them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent
from recnets.layers.norm import norm_of
from recnets.models import RecNet
from recnets.models.recnet import Stem
from recnets.models.squeezed import Expand, SqueezedRecurrent, SqueezedStem
from recnets.ops.torch import conv, step_norm
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
        self.register_buffer("weight", (stem.conv.weight * scale[:, None, None, None]).detach())
        self.register_buffer("bias", (shift + own).detach())
        self.expand = stem.expand if isinstance(stem, SqueezedStem) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(torch.relu(torch.conv2d(x, self.weight, self.bias, padding=1)))


class UnrolledRecurrent(nn.Module):
    """A Recurrent module in evaluation, (N, d·s_in, H, W) -> (N, c_out, H, W).

    `scale` says where a step's BN is applied: to the "weights" (h_i = relu(x_i ⊛ s_i·W_x + h_{i-1} ⊛ s_i·W_h + t_i);
    a runtime multiplies them once, when it loads the file, which holds W_x, W_h and the vectors s_i only) or to the
    "states" (h_i = relu(s_i·(x_i ⊛ W_x + h_{i-1} ⊛ W_h) + t_i); no copies in memory either, more work a step).
    """

    weight_x: Tensor
    weight_h: Tensor
    start: Tensor

    def __init__(self, module: Recurrent, transition: str, scale: str) -> None:
        super().__init__()
        crc = module.crc
        self.d, self.s_in, self.s_out, self.padding_mode = crc.d, crc.s_in, crc.s_out, crc.padding_mode
        self.scale, self.concat = scale, transition == "concat"
        self.register_buffer("weight_x", crc.weight_x.detach())
        self.register_buffer("weight_h", crc.weight_h.detach())
        norm = crc.step_norm()
        bias = torch.zeros(crc.s_out) if crc.bias is None else crc.bias.detach()
        shape = (-1, 1, 1, 1) if scale == "weights" else (-1, 1, 1)
        for i in range(crc.d):
            own = step_norm(norm, i, crc.s_out)
            factor, shift = (torch.ones(crc.s_out), torch.zeros(crc.s_out)) if own is None else own.affine()
            shift = (shift + factor * bias).detach()
            self.register_buffer(f"scale_{i}", factor.detach().reshape(shape))
            self.register_buffer(f"shift_{i}", shift if scale == "weights" else shift.reshape(shape))
        self._read_transition(module)

    def _read_transition(self, module: Recurrent) -> None:
        factor, start = norm_of(module.transition.norm).affine()
        matrix = (module.transition.conv.weight * factor[:, None, None, None]).detach()
        kept = torch.ones(self.d * self.s_out, dtype=torch.bool)
        self.expand: nn.Module = nn.Identity()
        if isinstance(module, SqueezedRecurrent):
            kept, self.expand = module.transition.kept, module.transition.expand
        self.register_buffer("start", start.detach())
        self.register_buffer("matrix", matrix if self.concat else None)
        self.counts = [int(part.sum()) for part in kept.split(self.s_out)]
        for i, (own, part) in enumerate(zip(kept.split(self.s_out), matrix.split(self.counts, dim=1), strict=True)):
            self.register_buffer(f"kept_{i}", None if own.all() else own.nonzero().flatten())
            self.register_buffer(f"matrix_{i}", None if self.concat else part.contiguous())

    def _step(self, i: int, x_i: Tensor, h: Tensor | None) -> Tensor:
        scale, shift = getattr(self, f"scale_{i}"), getattr(self, f"shift_{i}")
        if self.scale == "weights":
            z = conv(x_i, self.weight_x * scale, shift, self.padding_mode)
            return torch.relu(z if h is None else conv(h, self.weight_h * scale, None, self.padding_mode) + z)
        z = conv(x_i, self.weight_x, None, self.padding_mode)
        if h is not None:
            z = conv(h, self.weight_h, None, self.padding_mode) + z
        return torch.relu(z * scale + shift)

    def states(self, x: Tensor) -> Iterator[Tensor]:
        """h_0 … h_{d-1}, each (N, s_out, H, W), made when asked for: a streamed graph holds them in that order."""
        h: Tensor | None = None
        for i, x_i in enumerate(torch.split(x, self.s_in, dim=1)):
            h = self._step(i, x_i, h)
            yield h

    def transition(self, hidden: Iterable[Tensor]) -> Tensor:
        """relu(Σ_i h_i ⊛ A_i + start), by one convolution or a running sum."""
        total: Tensor | None = None
        wide: list[Tensor] = []
        for i, h in enumerate(hidden):
            if not self.counts[i]:
                continue
            kept = getattr(self, f"kept_{i}")
            read = h if kept is None else h.index_select(1, kept)
            if self.concat:
                wide.append(read)
            elif total is None:
                total = torch.conv2d(read, getattr(self, f"matrix_{i}"), self.start)
            else:
                total = torch.conv2d(read, getattr(self, f"matrix_{i}")) + total
        if total is None:
            total = torch.conv2d(torch.cat(wide, dim=1), self.matrix, self.start)  # type: ignore[arg-type]
        return self.expand(torch.relu(total))

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


__all__ = ["SCALES", "TRANSITIONS", "Expand", "Unrolled", "UnrolledRecurrent", "UnrolledStem"]
