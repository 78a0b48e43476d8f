"""Every plan that fits for the CUDA kernels of a network's layers, and how to run by one of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gpu import Row
from recnets import create_model
from recnets.layers import CRC
from recnets.ops.cuda import crc, grad_plan, kernels, plan
from recnets.ops.cuda.grad_plan import GradPlan
from recnets.ops.cuda.plan import Layer, Plan

MOST_THREADS = 1024  # that a multiprocessor is given: with more, too few registers are left for each
SHARED_OF_ALL = 228 * 1024  # bytes of a multiprocessor; a block takes 1 KiB more than it asks for


def layers_of(model: str, batch: int, side: int = 32) -> dict[Layer, int]:
    """The CRC layers of a network on a batch of pictures, and how often each is there."""
    found: dict[Layer, int] = {}

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, CRC)
        sizes = (module.weight_x.shape[-1], module.weight_h.shape[-1])
        layer = Layer(batch, *inputs[0].shape[2:], module.d, module.s_in, module.s_out, *sizes)
        found[layer] = found.get(layer, 0) + 1

    with torch.device("meta"):
        network = create_model(model, mode="concat", backend="torch")
        for module in network.modules():
            if isinstance(module, CRC):
                module.register_forward_pre_hook(note)
        network.eval()(torch.empty(1, 3, side, side))
    return found


def step_plans(name: str, layer: Layer, multiprocessors: int) -> list[Plan]:
    """Plans of "forward" or "backward", the chosen one first; none where the CUDA kernels do not take the layer."""
    chosen = plan.step(name, layer, multiprocessors, has_wgmma())
    if chosen is None:
        return []
    found = {chosen: None}
    if has_wgmma():
        found |= dict.fromkeys(wide_step_plans(name, layer))
    blocks = [nb for nb in (layer.so, layer.so // 2, layer.so // 4) if nb >= 16 and nb % 16 == 0 and nb <= 64]
    for tile, nb, most, largest in itertools.product(plan.tiles(layer), blocks, (4, 8, 16), (16, 8, 4)):
        shape = plan.warps(tile.pixels(layer), nb, most=most, largest=largest)
        cut = shape and plan.plan_of(name, layer, tile, nb, shape, multiprocessors)
        if not cut or tile.pixels(layer) < 64:
            continue
        for resident, prefetch in itertools.product((1, 2, 3, 4), (False, True)):
            together = 32 * cut.wm * cut.wn * resident
            if together > MOST_THREADS or resident * (cut.shared + 1024) > SHARED_OF_ALL:
                continue
            fits = plan.with_residents(cut, layer, resident, prefetch, multiprocessors)
            found |= {fits: None} | ({fits._replace(stacked=True): None} if plan.stackable(fits, layer) else {})
    return list(found)


def wide_step_plans(name: str, layer: Layer) -> list[Plan]:
    """Those by wgmma."""
    cuts = itertools.product(plan.tiles(layer), (1, 2, 3, 4), (1, 2), (1, 2, 3, 4))
    found = [
        plan.wide_plan_of(name, layer, tile, groups, buffers, resident)
        for tile, groups, buffers, resident in cuts
        if 128 * groups * resident <= MOST_THREADS
    ]
    return [each for each in found if each is not None]


def has_wgmma() -> bool:
    """Without a GPU as an H200."""
    return not torch.cuda.is_available() or kernels.has_wgmma(0)


def grad_plans(layer: Layer) -> list[GradPlan]:
    """Plans of both weights' gradients in one launch, the chosen one first; none where that is not possible."""
    chosen = grad_plan.weight_grad(layer, layer.so, layer.kh, True, has_wgmma())
    if chosen is None:
        return []
    found = {chosen: None}
    for tile, groups, stages in itertools.product(plan.tiles(layer), (2, 3, 4), (2, 3)):  # more groups spill
        if 32 * layer.kh * groups > MOST_THREADS or not 64 <= tile.pixels(layer) <= 512:
            continue
        cut = (layer, layer.kh, tile, chosen.ci, chosen.co, chosen.x, groups, stages, chosen.blocks)
        fits = grad_plan.grad_plan_of(*cut)
        if fits is not None:
            found |= {fits: None, fits._replace(staggered=True): None}
    for tile, stages in itertools.product(plan.tiles(layer) if has_wgmma() else [], (2, 3, 4)):
        wide = grad_plan.wide_grad_plan_of(layer, tile, stages)
        if wide is not None and 64 <= tile.pixels(layer) <= 512:
            found |= {wide: None}
    return list(found)


def plans_of(name: str, layer: Layer, multiprocessors: int, *, wide: bool = False) -> list[Any]:
    """Of any kernel, the chosen one first; the others only by wgmma if `wide`."""
    found: list[Any] = grad_plans(layer) if name == "weight_grad" else step_plans(name, layer, multiprocessors)
    return [each for number, each in enumerate(found) if not wide or number == 0 or each.wide]


def use(name: str, layer: Layer, chosen: Plan | GradPlan | None) -> None:
    """Let the kernels run by this plan; by their own for None."""
    key = (layer, layer.so, True)
    if isinstance(chosen, GradPlan):
        grad_plan.grad_overrides[key] = chosen
    elif chosen is not None:
        plan.overrides[name, layer] = chosen
    else:
        grad_plan.grad_overrides.pop(key, None)
        plan.overrides.pop((name, layer), None)
    plan.step.cache_clear()
    grad_plan.weight_grad.cache_clear()


def kernel_of(name: str, each: Plan | GradPlan) -> str:
    """The plan's kernel, which is not always called as what it computes."""
    return each.kernel if isinstance(each, GradPlan) else each.kernel(name)


def defines_of(layer: Layer, each: Plan | GradPlan) -> dict[str, int]:
    """Constants of a plan's kernel."""
    if isinstance(each, GradPlan):
        return each.defines(layer, layer.so, layer.kh, 1)
    return {**each.defines(layer), **crc.sigma_defines(batch=True, relu=True)}


def describe(layer: Layer, each: Plan | GradPlan) -> Row:
    """Layer and plan in the columns of a table."""
    row: Row = {"layer": f"{layer.n}x{layer.h}x{layer.w} s_in {layer.si} s_out {layer.so} d {layer.d}"}
    row["tile"] = f"{each.tile.images}x{each.tile.rows}"
    if isinstance(each, GradPlan):
        if each.wide:
            return {**row, "plan": f"wide, {each.ci}+{each.x}x{each.co} channels, {each.stages} stages"}
        how = ", staggered" if each.staggered else ""
        return {**row, "plan": f"{each.ci}x{each.co} channels, {each.groups} groups, {each.stages} stages{how}"}
    ways = [
        word
        for word, there in (
            ("single", each.single),
            ("prefetch", each.prefetch),
            ("stacked", each.stacked),
            ("wide", each.wide),
            ("2 buffers", each.buffers == 2),
        )
        if there
    ]
    cut = f"{each.nb} channels, {each.wm}x{each.wn} warps of {each.mt}x{each.nt}, {each.resident} resident"
    return {**row, "plan": ", ".join([cut, *ways])}
