"""Time every plan that fits for the CUDA kernels of a network's layers, to see whether the chosen ones are the best.

    python benchmarks/plans.py --batch 1024                          # minutes; 64 by default
    python benchmarks/plans.py --kernels forward --model recnet_60_480
    python benchmarks/plans.py --wide                                # only those by wgmma, beside the chosen ones
    python benchmarks/plans.py --keep                                # from then on the kernels run by the fastest
    python benchmarks/plans.py --list                                # how many there are, without a GPU

A plan is how a layer is cut: tiles, channels a block, warps, blocks a multiprocessor (recnets.ops.cuda.plan). Times are
of all that the layer's pass launches, under a CUDA graph, bf16. Plans whose kernel spills registers to memory are rows
without a time. A plan whose result is not that of the chosen plan is a row with an error, and the exit status is 1. The
CSV goes to benchmarks/results/, written after every layer.

At the end the fastest few and the chosen one are timed again, by turns; with --keep the best of them, if it beats the
chosen one by more than chance, goes to src/recnets/ops/cuda/tuned.json, which the kernels are planned by. In a share of
a GPU (CUDA's multi-process service) plans are for its multiprocessors; several processes may keep theirs at once.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, context, file_name, write_csv
from gpu import Row, graphed, rms, seconds
from recnets import create_model
from recnets.layers import CRC
from recnets.ops.cuda import crc, grad_plan, kernels, plan, tuned
from recnets.ops.cuda.grad_plan import GradPlan
from recnets.ops.cuda.plan import Layer, Plan
from recnets.utils import git_commit

MULTIPROCESSORS = 132  # of an H200, for --list
MOST_THREADS = 1024  # that a multiprocessor is given: with more, too few registers are left for each
SHARED_OF_ALL = 228 * 1024  # bytes of a multiprocessor; a block takes 1 KiB more than it asks for
KERNELS = ("forward", "backward", "weight_grad")
BOUND = 1e-2
A_FEW = 64  # bytes a thread may spill and still be timed
NEAR = 1.15  # times the best time: what a short look must show of a plan to be timed with care
FINALISTS = 3  # plans that are timed once more beside the chosen one
ROUNDS = 7  # of that, by turns
FASTER = 0.98  # of the chosen plan's time: what a plan must reach to be kept
EPS = 1e-5


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


def passes(layer: Layer) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """What is timed for each kernel, on random tensors."""
    torch.manual_seed(0)
    x = torch.randn(layer.n, layer.h, layer.w, layer.d * layer.si, device="cuda").bfloat16()
    weights = [
        torch.randn(layer.so, s, k, k, device="cuda") / (s * k * k) ** 0.5
        for s, k in ((layer.si, layer.kx), (layer.so, layer.kh))
    ]
    norm = [torch.rand(layer.d * layer.so, device="cuda") + 0.5, torch.zeros(layer.d * layer.so, device="cuda")]

    def forward() -> tuple[Tensor, ...]:
        return crc.forward(x, *weights, *norm, None, layer=layer, eps=EPS, relu=True)

    h, z, sums = forward()
    dh = torch.randn_like(h)

    def backward() -> tuple[Tensor, ...]:
        tensors = (dh, x, h, z, sums, *weights, *norm)
        return crc.backward(*tensors, layer=layer, eps=EPS, batch=True, relu=True)

    def weight_grad() -> tuple[Tensor, ...]:
        return tuple(crc.add_parts(crc.weight_grads(x, h, dh, layer), (weights[0], weights[1])))

    return {"forward": forward, "backward": backward, "weight_grad": weight_grad}


def kernel_of(name: str, each: Plan | GradPlan) -> str:
    """The plan's kernel, which is not always called as what it computes."""
    return each.kernel if isinstance(each, GradPlan) else each.kernel(name)


def defines_of(layer: Layer, each: Plan | GradPlan) -> dict[str, int]:
    """Constants of a plan's kernel."""
    if isinstance(each, GradPlan):
        return each.defines(layer, layer.so, layer.kh, 1)
    return {**each.defines(layer), **crc.sigma_defines(batch=True, relu=True)}


def compile_all(name: str, layer: Layer, plans: list[Any]) -> None:
    """Start compiling every plan's kernel, many at a time."""
    for each in plans:
        kernels.compile_ahead(kernel_of(name, each), torch.bfloat16, 0, defines_of(layer, each))


def thoroughly(replay: Callable[[], None], best: float) -> float:
    """Seconds of a replay, measured with care only where a short look comes near the best so far."""
    time = seconds(replay, rounds=1, target=0.004)
    return seconds(replay, rounds=5, target=0.02) if time < NEAR * best else time


def measure(name: str, layer: Layer, plans: list[Any]) -> list[Row]:
    """A row for every plan, the chosen one first."""
    rows: list[Row] = []
    run = passes(layer)[name]
    compile_all(name, layer, plans)
    expected: tuple[Tensor, ...] = ()
    first, best = 0.0, math.inf
    for each in plans:
        row: Row = {"kernel": name, **describe(layer, each), "registers": "", "spilled": ""}
        row |= {"us": "", "of_chosen": "", "us_by_turns": "", "error": ""}
        use(name, layer, each)
        try:
            constants = defines_of(layer, each)
            taken = kernels.kernel(kernel_of(name, each), torch.bfloat16, 0, constants, each.shared).resources
            row |= taken._asdict()
            if taken.spilled > A_FEW and each is not plans[0]:
                continue
            got = run()
            if not expected and each is not plans[0]:
                raise ValueError("not compared: the chosen plan failed")
            expected = expected or tuple(t.double() for t in got)
            worst = max(rms(a, b) for a, b in zip(got, expected, strict=True))
            if not worst < BOUND:
                raise ValueError(f"differs from the chosen plan's result by {worst:.1e}")
            time = thoroughly(graphed(run), best)
            first, best = first or time, min(best, time)
            row |= {"us": round(time * 1e6, 1), "of_chosen": round(time / first, 3)}
        except (RuntimeError, ValueError) as error:
            row["error"] = str(error).strip().splitlines()[0][:200]
        finally:
            use(name, layer, None)
            rows.append(row)
    finals = finalists(rows)
    for index, time in zip(finals, by_turns(name, layer, [plans[i] for i in finals], run), strict=True):
        rows[index]["us_by_turns"] = round(time * 1e6, 1)
    return rows


def finalists(rows: Sequence[Row]) -> list[int]:
    """The chosen plan and the fastest others, if any was timed beside it."""
    others = sorted((row["us"], index) for index, row in enumerate(rows) if index and row["us"] != "")
    return [0, *(index for _, index in others[:FINALISTS])] if others and rows[0]["us"] != "" else []


def by_turns(name: str, layer: Layer, plans: Sequence[Any], run: Callable[[], object]) -> list[float]:
    """Seconds of each plan, by turns: whatever else slows the device down bears on all alike."""
    replays = []
    for each in plans:
        use(name, layer, each)
        replays.append(graphed(run))
        use(name, layer, None)
    rounds = [[seconds(replay, rounds=1, target=0.01) for replay in replays] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def fastest(name: str, layer: Layer, plans: list[Any], rows: list[Row], multiprocessors: int) -> dict[str, Any] | None:
    """The plan to keep, with its time and the chosen one's; None where the chosen one is as good."""
    times = [(row["us_by_turns"], index) for index, row in enumerate(rows) if row["us_by_turns"] != ""]
    before = rows[0]["us_by_turns"]
    if not times or min(times)[0] > FASTER * before:
        return None
    us, index = min(times)
    best, key = plans[index], tuned.key_of(name, layer, 0 if name == "weight_grad" else multiprocessors)
    fields = tuned.fields_of(name)[2:]  # the first two are the tile's
    choice = {"images": best.tile.images, "rows": best.tile.rows, **{f: getattr(best, f) for f in fields}}
    return {**key, **choice, "us": us, "before": before, "measured": context("cuda"), "commit": git_commit()}


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


def show(rows: list[Row], top: int = 5) -> None:
    """The chosen plan and the fastest ones."""
    timed = [row for row in rows if row["us"] != ""]
    print(f"{rows[0]['kernel']}, {rows[0]['layer']}: {len(rows)} plans, {len(timed)} timed")
    for row in [*rows[:1], *sorted(timed, key=lambda row: row["us"])[:top]]:
        times = f"{row['us'] or row['error']:>9} µs  {row['us_by_turns']:>9} µs by turns"
        print(f"  {times}  {row['tile']:>5}  {row['plan']}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recnet_60_1280")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--wide", action="store_true", help="only plans by wgmma, which compute capability 9.0 has")
    parser.add_argument("--keep", action="store_true", help="run by the fastest plans from now on")
    parser.add_argument("--list", action="store_true", help="only say how many plans there are")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not args.list and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; without one, --list counts the plans", file=sys.stderr)
        return 2
    if args.wide and not has_wgmma():
        print(
            f"--wide needs compute capability 9.0; this device has {torch.cuda.get_device_capability(0)}",
            file=sys.stderr,
        )
        return 2
    count = MULTIPROCESSORS if args.list else kernels.multiprocessors(0)
    rows: list[Row] = []
    saved = {"chosen": 0.0, "best": 0.0}
    for layer, times in layers_of(args.model, args.batch).items():
        for name in args.kernels:
            plans = plans_of(name, layer, count, wide=args.wide)
            if args.list or not plans:
                print(f"{name}, {layer}: {len(plans)} plans")
                continue
            own = measure(name, layer, plans)
            show(own)
            rows += own
            words = (args.model, str(args.batch), f"{count}-multiprocessors", context("cuda"))
            path = args.out / (file_name("plans", *words) + ".csv")
            write_csv(path, rows)
            best = fastest(name, layer, plans, own, count) if args.keep else None
            if best is not None:
                tuned.keep([best])
                plan.step.cache_clear()
                grad_plan.weight_grad.cache_clear()
            timed = [row["us_by_turns"] for row in own if row["us_by_turns"] != ""]
            saved["chosen"] += times * (own[0]["us_by_turns"] or 0.0)
            saved["best"] += times * min(timed, default=0.0)
    if rows:
        print(f"all layers: chosen {saved['chosen']:.0f} µs, best {saved['best']:.0f} µs; {path}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
