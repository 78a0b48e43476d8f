"""`squeeze`: take out of a trained RecNet, without loss, what training left dead.

A channel whose BN weight is (near) zero is a constant. What that allows depends on who reads it:

- The transition reads step channels pixel by pixel: a constant's column moves into the running mean of the
  transition's BN, exactly, whether the network infers or trains on.
- The next step reads the same channel through W_h, whose zero padding ends a constant at the border. W_h and W_x are
  shared by all steps, so a state channel goes from them only if it is dead in every step and zero wherever it is
  read. One that is zero in some step is made exactly so: what runs the network need not compute it there
  (`recnets.deploy.live`).
- A constant output of the stem or of a transition costs its row and stays as a number (`Expand`); if every
  segment's channel c is zero, the column c of the next W_x goes too.
- The classifier reads averages: a constant feature moves into its bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recnets.layers import Recurrent
from recnets.models import RecNet
from recnets.models.squeezed import SqueezedRecurrent, SqueezedStem, recurrent_modules, write_mask
from recnets.models.weights import config_of

THRESHOLD = 1e-2
# A dead channel below this share of the threshold counts as zero, so that layers with padding lose nothing either.
ZERO_SHARE = 1e-2


class Channels(NamedTuple):
    """What BN and ReLU make of C channels: which are constants, and of what value."""

    dead: Tensor
    value: Tensor
    zero: Tensor


@dataclass(frozen=True)
class Row:
    """One layer before and after; for the stem and the classifier only outputs and parameters say something."""

    name: str
    steps: tuple[int, int]
    outputs: tuple[int, int]
    s_in: tuple[int, int]
    s_out: tuple[int, int]
    parameters: tuple[int, int]


def channels(norm: nn.BatchNorm1d | nn.BatchNorm2d, threshold: float) -> Channels:
    """The constants after `norm` and ReLU.

    A normalised channel is roughly a standard normal variable, so relu(γ·z + β) has the mean
    β·Φ(β/|γ|) + |γ|·φ(β/|γ|): relu(β) for γ = 0, and the best constant for a γ that is merely small.
    """
    gamma, beta = norm.weight.detach().double().abs(), norm.bias.detach().double()
    ratio = beta / gamma.clamp_min(1e-30)
    cdf = 0.5 * (1 + torch.erf(ratio / math.sqrt(2)))
    pdf = torch.exp(-0.5 * ratio.clamp(-40, 40) ** 2) / math.sqrt(2 * math.pi)
    value = (beta * cdf + gamma * pdf).clamp_min(0).to(norm.weight.dtype)
    dead = gamma <= threshold
    return Channels(dead, value, dead & (value <= ZERO_SHARE * threshold))


def at_least_one(kept: Tensor) -> Tensor:
    """A layer of no channels cannot be built: keep the first."""
    if kept.any():
        return kept
    kept = kept.clone()
    kept[0] = True
    return kept


class _Layer(NamedTuple):
    """What is kept of a Recurrent module. `outputs` and `present` are of its c_out, the rest as in a plan."""

    x: Tensor
    h: Tensor
    columns: Tensor
    outputs: Tensor
    present: Tensor


def _steps(module: Recurrent, threshold: float) -> Channels:
    """The d·s_out step channels of a module as its transition sees them."""
    crc = module.crc
    if crc.norm is None:
        none = torch.zeros(crc.d * crc.s_out, dtype=torch.bool, device=crc.weight_h.device)
        return Channels(none, none.float(), none)
    found = channels(crc.norm, threshold)
    return Channels(*(t.repeat(crc.d) for t in found)) if crc.nonlinearity == "shared_bn_relu" else found


def _states(module: Recurrent, steps: Channels) -> Tensor:
    """Which state channels are kept: all but those dead in every step and zero in every step that another reads."""
    crc = module.crc
    if crc.nonlinearity in ("relu", "linear") or not crc.recurrent:
        return torch.ones(crc.s_out, dtype=torch.bool, device=crc.weight_h.device)
    dead, zero = steps.dead.view(crc.d, -1), steps.zero.view(crc.d, -1)
    return at_least_one(~(dead.all(dim=0) & zero[:-1].all(dim=0)))


def _plan(model: RecNet, threshold: float) -> tuple[dict[str, _Layer], _Layer]:
    """What is kept of every Recurrent module, and of the stem (its `outputs` and `present`)."""
    modules = recurrent_modules(model)
    norms = [model.stem.norm, *(m.transition.norm for m in modules.values())]
    produced = [channels(norm, threshold) for norm in norms]
    xs = []
    for module, made in zip(modules.values(), produced, strict=False):
        zero = made.zero.view(module.crc.d, module.crc.s_in)
        xs.append(at_least_one(~zero.all(dim=0)))
    layers: list[_Layer] = []
    for i, made in enumerate(produced):
        if i < len(xs):  # read by a CRC layer: a channel is in its place, computed or constant, unless W_x lost it
            present = xs[i].repeat(len(made.dead) // len(xs[i]))
            outputs = ~made.dead
            if not (outputs & present).any():
                outputs = outputs | (torch.arange(len(outputs), device=outputs.device) == int(present.nonzero()[0]))
        elif model.num_classes:  # read by the classifier, which can do without
            present = outputs = at_least_one(~made.dead)
        else:  # the features are the result
            present, outputs = torch.ones_like(made.dead), at_least_one(~made.dead)
        blank = torch.ones(0, dtype=torch.bool)
        layers.append(_Layer(blank, blank, blank, outputs & present, present))
    kept: dict[str, _Layer] = {}
    for (name, module), layer, x in zip(modules.items(), layers[1:], xs, strict=True):
        steps = _steps(module, threshold)
        h = _states(module, steps)
        states = h.repeat(module.crc.d)
        columns = ~steps.dead & states
        if not columns.any():  # a transition of no columns cannot be built
            columns = torch.arange(len(columns), device=columns.device) == int(states.nonzero()[0])
        kept[name] = layer._replace(x=x, h=h, columns=columns)
    return kept, layers[0]


def squeeze(model: nn.Module, threshold: float = THRESHOLD) -> RecNet:
    """A smaller RecNet that computes the same: constants folded away, their weights left out.

    Args:
        model: a trained RecNet; it stays as it is.
        threshold: BN weights up to this magnitude count as zero. At 0 only exact zeros go and the outputs differ
            by rounding; at the default, trained networks keep their predictions (check them: `recnet squeeze` does).

    The result is a RecNet like any other: it trains on, saves, loads, profiles and exports. Step channels that count as
    zero are exactly that, and get no gradient: they stay so.
    """
    if not isinstance(model, RecNet):
        raise TypeError(f"squeeze takes a RecNet, got {type(model).__name__}")
    if isinstance(model.stem, SqueezedStem):
        raise ValueError("this RecNet is squeezed already; squeeze the network that it was made from")
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be at least 0 and below 1, got {threshold}")
    with torch.no_grad():
        layers, stem = _plan(model, threshold)
        plan = {"stem": {"outputs": write_mask(stem.outputs[stem.present])}}
        for name, layer in layers.items():
            states = layer.h.repeat(len(layer.columns) // len(layer.h))
            masks = {"x": layer.x, "h": layer.h, "columns": layer.columns[states]}
            masks["outputs"] = layer.outputs[layer.present]
            plan[name] = {key: write_mask(mask) for key, mask in masks.items()}
        config = config_of(model)
        small = replace(config, overrides={**config.overrides, "squeezed": plan}).build()
        assert isinstance(small, RecNet)
        reference = model.stem.conv.weight
        small.to(reference.device, reference.dtype).train(model.training)
        _copy(model, small, layers, stem, threshold)
    return small


def _copy(model: RecNet, small: RecNet, layers: dict[str, _Layer], stem: _Layer, threshold: float) -> None:
    """The kept weights of `model` into `small`, constants into running means, biases and `Expand`."""
    assert isinstance(small.stem, SqueezedStem)
    small.stem.conv.weight.copy_(model.stem.conv.weight[stem.outputs])
    if model.stem.conv.bias is not None and small.stem.conv.bias is not None:
        small.stem.conv.bias.copy_(model.stem.conv.bias[stem.outputs])
    _copy_norm(model.stem.norm, small.stem.norm, stem.outputs)
    small.stem.expand.constants.copy_(channels(model.stem.norm, threshold).value[stem.present & ~stem.outputs])
    modules = zip(layers.values(), recurrent_modules(model).values(), recurrent_modules(small).values(), strict=True)
    for layer, old, new in modules:
        assert isinstance(new, SqueezedRecurrent)
        new.crc.weight_x.copy_(old.crc.weight_x[layer.h][:, layer.x])
        new.crc.weight_h.copy_(old.crc.weight_h[layer.h][:, layer.h])
        if old.crc.bias is not None and new.crc.bias is not None:
            new.crc.bias.copy_(old.crc.bias[layer.h])
        if old.crc.norm is not None and new.crc.norm is not None:
            _copy_norm(old.crc.norm, new.crc.norm, layer.h.repeat(old.crc.norm.num_features // old.crc.s_out))
            _switch_off(new.crc.norm, threshold)
        matrix = old.transition.conv.weight
        new.transition.conv.weight.copy_(matrix[layer.outputs][:, layer.columns])
        _copy_norm(old.transition.norm, new.transition.norm, layer.outputs)
        constants = _steps(old, threshold).value * ~layer.columns
        new_mean = new.transition.norm.running_mean
        assert new_mean is not None
        new_mean.sub_((matrix.flatten(1) @ constants.to(matrix.dtype))[layer.outputs])
        made = channels(old.transition.norm, threshold)
        new.transition.expand.constants.copy_(made.value[layer.present & ~layer.outputs])
    _copy_classifier(model, small, layer.outputs, made.value)


def _copy_norm(old: nn.BatchNorm2d, new: nn.BatchNorm2d, kept: Tensor) -> None:
    own = new.state_dict()
    for name, tensor in old.state_dict().items():
        own[name].copy_(tensor[kept] if tensor.dim() else tensor)


def _switch_off(norm: nn.BatchNorm2d, threshold: float) -> None:
    """Channels that count as zero give exactly that."""
    zero = channels(norm, threshold).zero
    norm.weight[zero] = 0
    norm.bias[zero] = norm.bias[zero].clamp_max(0)


def _copy_classifier(model: RecNet, small: RecNet, kept: Tensor, value: Tensor) -> None:
    small.classifier.load_state_dict(
        {k: v for k, v in model.classifier.state_dict().items() if v.shape == small.classifier.state_dict()[k].shape},
        strict=False,
    )
    pairs = [
        (old, new)
        for old, new in zip(model.classifier.modules(), small.classifier.modules(), strict=True)
        if isinstance(old, nn.Linear)
    ]
    if pairs:  # the first one reads the features
        old, new = pairs[0]
        assert isinstance(new, nn.Linear)
        new.weight.copy_(old.weight[:, kept])
        new.bias.copy_(old.bias + old.weight[:, ~kept] @ value[~kept])


def describe(model: RecNet, small: RecNet) -> list[Row]:
    """What went, layer by layer."""

    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    none = (0, 0)
    outputs = (model.stem.conv.out_channels, small.stem.conv.out_channels)
    rows = [Row("stem", none, outputs, none, none, (size(model.stem), size(small.stem)))]
    modules = zip(recurrent_modules(model).items(), recurrent_modules(small).values(), strict=True)
    for (name, old), new in modules:
        rows.append(
            Row(
                name,
                steps=(old.transition.c_in, new.transition.c_in),
                outputs=(old.transition.c_out, new.transition.c_out),
                s_in=(old.crc.s_in, new.crc.s_in),
                s_out=(old.crc.s_out, new.crc.s_out),
                parameters=(size(old), size(new)),
            )
        )
    features = (model.num_features, small.num_features)
    rows.append(Row("classifier", none, features, none, none, (size(model.classifier), size(small.classifier))))
    return rows
