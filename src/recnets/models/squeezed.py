"""The shape of a squeezed RecNet: a RecNet without the channels that training left constant.

`RecNet(…, squeezed=plan)` builds one. The plan is plain JSON, so it travels in a weights file's configuration. It
has an entry for "stem" and for each Recurrent module ("stages.0.0" …), whose values are masks of what is kept, written
as hexadecimal digits:

- "x": of s_in, the channels of an input segment; "h": of s_out, the channels of a hidden state.
- "columns": of d·s_out (as many as "h" keeps), what the transition reads.
- "outputs": of the channels that the next layer reads, those that are computed; the others are constants.

`recnets.deploy.squeeze` finds what can go and copies the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent, Stem, TransitionBlock
from recnets.layers.norm import norm_of
from recnets.models.recnet import RecNet
from recnets.ops import torch as plain
from recnets.ops.dispatch import Following

Plan: TypeAlias = Mapping[str, Mapping[str, str]]


def write_mask(kept: Tensor) -> str:
    """A bool vector as hexadecimal digits, the first element in the highest bit, its length in front: "6:2c"."""
    bits = "".join("1" if k else "0" for k in kept.tolist())
    return f"{len(bits)}:{int(bits, 2):x}"


def read_mask(text: str) -> Tensor:
    """The bool vector of `write_mask`."""
    length, _, digits = text.partition(":")
    return torch.tensor([bit == "1" for bit in f"{int(digits, 16):0{int(length)}b}"])


class Expand(nn.Module):
    """(N, kept, H, W) -> (N, C, H, W): puts channels that are constants back in their places.

    A layer that reads a constant channel sees it end at the border of the picture, where zero padding begins, so
    a constant cannot become part of a bias there: it has to be a map.
    """

    order: Tensor
    constants: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        sources = torch.cat([kept.nonzero().flatten(), (~kept).nonzero().flatten()])
        self.register_buffer("order", sources.argsort(), persistent=False)
        self.register_buffer("constants", torch.zeros(int((~kept).sum())))

    def forward(self, y: Tensor) -> Tensor:
        if not len(self.constants):
            return y
        constants = self.constants.to(y.dtype).view(1, -1, 1, 1).expand(y.shape[0], -1, *y.shape[2:])
        return torch.cat([y, constants], dim=1).index_select(1, self.order)

    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """What makes all channels at once, where a ReLU follows: a constant is a row of zeros with a bias."""
        if not len(self.constants):
            return weight, bias
        rows = torch.cat([weight, weight.new_zeros(len(self.constants), *weight.shape[1:])])
        return rows.index_select(0, self.order), torch.cat([bias, self.constants]).index_select(0, self.order)


class SqueezedStem(Stem):
    """A stem that computes only some of its channels."""

    def __init__(self, in_channels: int, outputs: Tensor, bias: bool, backend: str) -> None:
        super().__init__(in_channels, int(outputs.sum()), bias=bias, backend=backend)
        self.expand = Expand(outputs)

    def forward(self, x: Tensor, following: Following | None = None) -> Tensor:
        return self.expand(super().forward(x))  # no one asks a squeezed module for `following`


class SqueezedTransition(TransitionBlock):
    """A transition that reads some of its input channels and computes some of its output channels."""

    columns: Tensor

    def __init__(self, columns: Tensor, outputs: Tensor, backend: str) -> None:
        super().__init__(int(columns.sum()), int(outputs.sum()), backend=backend)
        self.kept = columns
        self.register_buffer("columns", columns.nonzero().flatten(), persistent=False)
        self.expand = Expand(outputs)

    def forward(self, x: Tensor, pool: bool = False, following: Following | None = None) -> Tensor:
        return self.expand(super().forward(x.index_select(1, self.columns), pool=pool))


class SqueezedRecurrent(Recurrent):
    """A Recurrent module whose transition is squeezed."""

    transition: SqueezedTransition

    def __init__(self, s_in: int, s_out: int, d: int, columns: Tensor, outputs: Tensor, **options: Any) -> None:
        super().__init__(s_in, s_out, int(outputs.sum()), d, **options)
        self.transition = SqueezedTransition(columns, outputs, self.crc.backend)

    def _fused(self, x: Tensor, pool: bool) -> Tensor | None:
        """None: the kernel knows only whole transitions."""
        return None

    def _stream(self, x: Tensor) -> Tensor:
        """As in `Recurrent`; a step gives the sum only the channels that are kept of it."""
        crc, transition = self.crc, self.transition
        crc.check(x, f"Recurrent with {crc}")
        hidden = plain.steps(x, crc.weight_x, crc.weight_h, crc.bias, crc.step_norm(), crc.recurrence)
        counts = [int(kept.sum()) for kept in transition.kept.split(crc.s_out)]
        weights = transition.conv.weight.split(counts, dim=1)
        total: Tensor | None = None
        for i, (h, weight, columns) in enumerate(zip(hidden, weights, transition.columns.split(counts), strict=True)):
            if weight.shape[1]:
                part = torch.conv2d(h.index_select(1, columns - i * crc.s_out), weight)
                total = part if total is None else total + part
        assert total is not None
        return transition.expand(torch.relu(norm_of(transition.norm).apply(total)))


def recurrent_modules(model: RecNet) -> dict[str, Recurrent]:
    """The Recurrent modules by name, in the order of the forward pass."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Recurrent)}


def shrink(model: RecNet, plan: Plan) -> int:
    """Replace the stem and the Recurrent modules of a fresh RecNet by the smaller ones of `plan`.

    Returns the number of features that the classifier gets.
    """
    stem, backend = model.stem, model.crc_options.get("backend", "auto")
    try:
        outputs = read_mask(plan["stem"]["outputs"])
        model.stem = SqueezedStem(stem.conv.in_channels, outputs, stem.conv.bias is not None, backend)
        for name, module in recurrent_modules(model).items():
            entry = {key: read_mask(text) for key, text in plan[name].items()}
            sizes = (int(entry["x"].sum()), int(entry["h"].sum()), module.crc.d)
            outputs = entry["outputs"]
            squeezed = SqueezedRecurrent(*sizes, entry["columns"], outputs, **model.crc_options)
            model.set_submodule(name, squeezed)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"squeezed={plan!r:.80} is no plan of `recnets.deploy.squeeze` for this network") from error
    return len(outputs)
