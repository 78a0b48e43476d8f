"""What is read off a trained RecNet to write it in another form, first of all which channels have to be computed.

Weight decay switches step channels off for good: BN's weight becomes zero, its bias at most that, and ReLU gives zero
whatever the picture. Nobody misses such a channel, neither the next step nor the transition: a step does without its
rows of W_x and W_h, and the next without its column of W_h.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent, Stem
from recnets.layers.norm import norm_of
from recnets.models.squeezed import Expand, SqueezedRecurrent
from recnets.ops.torch import step_affines

BLOCK = 8
"""Convolutions compute channels in blocks of 4 to 16, whatever the runtime: fewer are not faster."""


Model = TypeVar("Model", bound=nn.Module)


def frozen(model: Model) -> Model:
    """A copy that only infers; the caller's model keeps its mode and its gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def foldable(module: Recurrent) -> bool:
    """Is a step a convolution with a BN or ReLU? Not in the linear recursion, nor in the grouped control."""
    return module.crc.recurrent and module.crc.nonlinearity != "linear"


def joint(module: Recurrent) -> bool:
    """Is a step one convolution, of [x_i, h_{i-1}], with zeros around the map?"""
    crc = module.crc
    return foldable(module) and crc.weight_x.shape[-1] == crc.weight_h.shape[-1] and crc.padding_mode == "zeros"


def affines(module: Recurrent) -> tuple[Tensor, Tensor]:
    """(s, t), each (d, s_out): in evaluation h_i = relu(s_i·(x_i ⊛ W_x + h_{i-1} ⊛ W_h) + t_i)."""
    crc = module.crc
    norm = crc.step_norm()
    like = crc.weight_h.detach()
    scales, shifts = like.new_ones(crc.d, crc.s_out), like.new_zeros(crc.d, crc.s_out)
    if norm is not None:
        pairs = step_affines(norm, crc.recurrence, crc.s_out)
        scales, shifts = (torch.stack([t.detach().flatten() for t in ts]) for ts in zip(*pairs, strict=True))
    return scales, shifts if crc.bias is None else shifts + scales * crc.bias.detach()


def read_channels(module: Recurrent) -> Tensor:
    """(d, s_out), which channels of which state the transition reads. Masks are on the CPU wherever the module is."""
    crc = module.crc
    if isinstance(module, SqueezedRecurrent):
        return module.transition.kept.cpu().view(crc.d, crc.s_out)
    return torch.ones(crc.d, crc.s_out, dtype=torch.bool, device="cpu")


def live_channels(scales: Tensor, shifts: Tensor, read: Tensor) -> Tensor:
    """(d, s_out), which channels of which state have to be computed; the others are zero, or read by no one.

    A step may have none, but the transition reads one at least.
    """
    live = ((scales != 0) | (shifts > 0)).cpu()
    live[-1] &= read[-1]
    if not (live & read).any():
        live.view(-1)[int(read.flatten().nonzero()[0])] = True
    return live


def in_blocks(live: Tensor) -> Tensor:
    """As many zero channels more as make a state a multiple of BLOCK wide, or whole. A step without any stays so."""
    live = live.clone()
    for row in live:
        missing = -int(row.sum()) % BLOCK if row.any() else 0
        row[(~row).nonzero().flatten()[:missing]] = True
    return live


def whole(weight: Tensor, bias: Tensor, squeezed: nn.Module) -> tuple[Tensor, Tensor]:
    """The convolution before a ReLU of a stem or a transition, of the channels too that squeezing made constants."""
    expand = getattr(squeezed, "expand", None)
    return expand.fold(weight, bias) if isinstance(expand, Expand) else (weight, bias)


def folded_stem(stem: Stem) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the stem's convolution with its BN folded in."""
    scale, shift = norm_of(stem.norm).affine()
    own = 0 if stem.conv.bias is None else stem.conv.bias * scale
    weight, bias = whole(stem.conv.weight * scale[:, None, None, None], shift + own, stem)
    return weight.detach(), bias.detach()
