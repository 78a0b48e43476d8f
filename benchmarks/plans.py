"""Time every plan that fits for the CUDA kernels of a network's layers, to see whether the chosen ones are the best.

    python benchmarks/plans.py --batch 1024                          # minutes; 64 by default
    python benchmarks/plans.py --kernels forward --model recnet_60_480
    python benchmarks/plans.py --wide                                # only those by wgmma, beside the chosen ones
    python benchmarks/plans.py --keep                                # from then on the kernels run by the fastest
    python benchmarks/plans.py --list                                # how many there are, without a GPU

A plan is how a layer is cut: tiles, channels a block, warps, blocks a multiprocessor (recnets.ops.cuda.plan). Times are
of all that the layer's pass launches, under a CUDA graph, bf16. Plans whose kernel spills registers to memory are rows
without a time. A plan whose result is not that of the chosen plan is a row with an error, as is one whose kernel faults
or hangs, after which a new process goes on with the next; then the exit status is 1. The CSV goes to
benchmarks/results/, written after every layer.

At the end the fastest few and the chosen one are timed again, by turns; with --keep the best of them, if it beats the
chosen one by more than chance, goes to src/recnets/ops/cuda/tuned.json, which the kernels are planned by. In a share of
a GPU (CUDA's multi-process service) plans are for its multiprocessors; several processes may keep theirs at once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candidates import defines_of, describe, has_wgmma, kernel_of, layers_of, plans_of, use
from checks import rms
from common import RESULTS, context, file_name, write_csv
from gpu import Row, graphed, seconds
from guarded import Journal, give_up, journal, supervise
from recnets.ops.cuda import crc, grad_plan, kernels, plan, tuned
from recnets.ops.cuda.plan import Layer
from recnets.utils import git_commit

MULTIPROCESSORS = 132  # of an H200, for --list
KERNELS = ("forward", "backward", "weight_grad")
BOUND = 1e-2
A_FEW = 64  # bytes a thread may spill and still be timed
NEAR = 1.15  # times the best time: what a short look must show of a plan to be timed with care
FINALISTS = 3  # plans that are timed once more beside the chosen one
ROUNDS = 7  # of that, by turns
FASTER = 0.98  # of the chosen plan's time: what a plan must reach to be kept
EPS = 1e-5
PATIENCE = 90.0  # seconds: a plan's kernel may have to be compiled first


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


def compile_all(name: str, layer: Layer, plans: list[Any]) -> None:
    """Start compiling every plan's kernel, many at a time."""
    for each in plans:
        kernels.compile_ahead(kernel_of(name, each), torch.bfloat16, 0, defines_of(layer, each))


def thoroughly(replay: Callable[[], None], best: float) -> float:
    """Seconds of a replay, measured with care only where a short look comes near the best so far."""
    time = seconds(replay, rounds=1, target=0.004)
    return seconds(replay, rounds=5, target=0.02) if time < NEAR * best else time


def is_faulty() -> bool:
    """Has a kernel faulted, after which this process can use the device no more?"""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Measuring:
    """What the plans of one kernel of a layer are measured with, and against: the chosen one's result, and its time."""

    def __init__(self, name: str, layer: Layer, known: Journal) -> None:
        self.name, self.layer, self.known = name, layer, known
        self.run = passes(layer)[name]
        self.expected: tuple[Tensor, ...] = ()
        self.first, self.best = 0.0, math.inf

    def row(self, each: Any, *, chosen: bool) -> Row:
        """A plan's row, by an earlier process or now."""
        key = f"{self.name} {self.layer} {each}"
        row: Row = {"kernel": self.name, **describe(self.layer, each), "registers": "", "spilled": ""}
        row |= {"us": "", "of_chosen": "", "us_by_turns": "", "error": ""}
        earlier = self.known.ended.get(key)
        if earlier is not None and (not chosen or earlier["error"]):  # what the chosen one computes is needed again
            self.best = min(self.best, (earlier["us"] or math.inf) * 1e-6)
            return dict(earlier)
        if key in self.known.lost:
            return {**row, "error": "hung, or ended its process"}
        use(self.name, self.layer, each)
        try:
            constants = defines_of(self.layer, each)
            kernel = kernels.kernel(kernel_of(self.name, each), torch.bfloat16, 0, constants, each.shared)
            row |= kernel.resources._asdict()
            if kernel.resources.spilled > A_FEW and not chosen:
                self.known.begin(key)
                self.known.end(key, row)
                return row
            if not self.expected and not chosen:
                raise ValueError("not compared: the chosen plan failed")
            self.known.begin(key)
            row |= self.times()
        except (RuntimeError, ValueError) as error:
            row["error"] = str(error).strip().splitlines()[0][:200]
        finally:
            use(self.name, self.layer, None)
        self.known.end(key, row)
        if row["error"] and is_faulty():
            give_up()
        return row

    def times(self) -> Row:
        """Of the plan in use, if its result is that of the chosen one, which comes first."""
        got = self.run()
        self.expected = self.expected or tuple(t.double() for t in got)
        worst = max(rms(a, b) for a, b in zip(got, self.expected, strict=True))
        if not worst < BOUND:
            raise ValueError(f"differs from the chosen plan's result by {worst:.1e}")
        time = thoroughly(graphed(self.run), self.best)
        self.first, self.best = self.first or time, min(self.best, time)
        return {"us": round(time * 1e6, 1), "of_chosen": round(time / self.first, 3)}


def measure(name: str, layer: Layer, plans: list[Any], known: Journal) -> list[Row]:
    """A row for every plan, the chosen one first; those that are known are not measured again."""
    measuring = Measuring(name, layer, known)
    compile_all(name, layer, plans)
    rows = [measuring.row(each, chosen=each is plans[0]) for each in plans]
    finals, key = finalists(rows), f"{name} {layer} by turns"
    if not finals or key in known.lost:
        return rows
    if key not in known.ended:
        known.begin(key)
        try:
            times = by_turns(name, layer, [plans[i] for i in finals], measuring.run)
            known.end(key, {str(i): round(time * 1e6, 1) for i, time in zip(finals, times, strict=True)})
        except RuntimeError as error:
            print(f"{key}: {error}", file=sys.stderr)
            if is_faulty():
                give_up()
            known.end(key, {})
    for index, us in known.ended[key].items():
        rows[int(index)]["us_by_turns"] = us
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


def timed(name: str, layer: Layer, args: argparse.Namespace, count: int, known: Journal) -> list[Row]:
    """The rows of one kernel of a layer, measured now or by an earlier process; with --keep the fastest is kept."""
    key = f"{name} {layer}"
    if key not in known.ended:
        plans = plans_of(name, layer, count, wide=args.wide)
        rows = measure(name, layer, plans, known) if plans else []
        best = fastest(name, layer, plans, rows, count) if args.keep and rows else None
        if best is not None:
            tuned.keep([best])
            plan.step.cache_clear()
            grad_plan.weight_grad.cache_clear()
        known.end(key, rows)
        if rows:
            show(rows)
    return list(known.ended[key])


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
    if args.list:
        for layer in layers_of(args.model, args.batch):
            for name in args.kernels:
                print(f"{name}, {layer}: {len(plans_of(name, layer, MULTIPROCESSORS, wide=args.wide))} plans")
        return 0
    known = journal()
    if known is None:
        return supervise(__file__, PATIENCE)
    count = kernels.multiprocessors(0)
    words = (args.model, str(args.batch), *(["wide"] if args.wide else []), f"{count}-multiprocessors", context("cuda"))
    path = args.out / (file_name("plans", *words) + ".csv")
    rows: list[Row] = []
    saved = {"chosen": 0.0, "best": 0.0}
    for layer, times in layers_of(args.model, args.batch).items():
        for name in args.kernels:
            own = timed(name, layer, args, count, known)
            if not own:
                print(f"{name}, {layer}: no plans")
                continue
            rows += own
            write_csv(path, rows)
            by_turns = [row["us_by_turns"] for row in own if row["us_by_turns"] != ""]
            saved["chosen"] += times * (own[0]["us_by_turns"] or 0.0)
            saved["best"] += times * min(by_turns, default=0.0)
    if rows:
        print(f"all layers: chosen {saved['chosen']:.0f} µs, best {saved['best']:.0f} µs; {path}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
