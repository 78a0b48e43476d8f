"""Loss curves with the kernels and without, in one picture with the noise between two runs.

    python benchmarks/curves.py --data-dir data                      # five epochs of CIFAR-10
    python benchmarks/curves.py --data digits --epochs 1             # anywhere, in a minute

Runs of the paper's recipe with its cosine shortened to `--epochs`, all with the same initial weights, images and
augmentation: "kernels", "plain" (backend "torch") and "plain, nudged", whose initial weights are moved by a rounding
error of the precision that it computes in. What that grows to is the noise of training; kernels that are right stay
within it. Writes a CSV and an SVG; the exit status is 1 where the largest difference from "plain" is more than twice
the noise.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from common import RESULTS, context, file_name, write_csv
from recnets.data import DataSet, load_dataset
from recnets.errors import RecNetsError
from recnets.training import Recipe, RunOptions, learning_rate, load_recipe
from recnets.training.charts import ticks
from recnets.training.distributed import Processes, choose_device
from recnets.training.session import build_session
from recnets.utils import atomic_write

ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-9, "fp16": 2.0**-12}
ALLOWED = 2.0  # times the noise
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 720, 260, 62, 16, 54, 66
COLOURS = ("#c8452d", "#1f6f8b", "#8fb8c6", "#b9a44c", "#7c6f9b")


@dataclass
class Run:
    """A curve: the mean loss of every few steps."""

    name: str
    losses: list[float]
    accuracy: float
    seconds: float


def train(name: str, recipe: Recipe, options: RunOptions, data: DataSet, every: int, nudge: int = 0) -> Run:
    """Train as `recnets.training.train` does, noting the mean loss of every `every` steps."""
    device = choose_device(options.device, Processes())
    session = build_session(recipe, options, data, device, Processes())
    if nudge:
        random = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for weight in session.model.parameters():
                weight.mul_(1 + ROUNDING[recipe.precision] * torch.randn(weight.shape, generator=random).to(device))
    step, meter, steps = session.step, session.step.meter, session.loader.steps
    losses: list[float] = []
    began = time.monotonic()
    for epoch in range(recipe.epochs):
        for index, batch in enumerate(session.loader.epoch(epoch)):
            step.set_lr(learning_rate(recipe, epoch, index, steps))
            step(batch.images, batch.labels, batch.global_size)
            done = epoch * steps + index + 1
            if done % every == 0 or done == recipe.epochs * steps:
                losses.append(float(meter.loss) / int(meter.images))
                meter.reset()
        print(f"{name}: epoch {epoch + 1}, loss {losses[-1]:.4f}, {time.monotonic() - began:.1f} s", flush=True)
    return Run(name, losses, session.test(session.model).accuracy, time.monotonic() - began)


def largest(a: Run, b: Run) -> float:
    """The largest difference of two curves; infinite where one of them is not a number."""
    distances = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    return max(distances) if all(map(math.isfinite, distances)) else math.inf


def draw(runs: Sequence[Run], at: Sequence[float], title: str) -> str:
    """SVG: the curves, and below them how far each is from "plain"."""
    plain = runs[1]
    apart = [(run.name, [abs(x - y) for x, y in zip(run.losses, plain.losses, strict=True)]) for run in runs]
    colours = dict(zip((run.name for run in runs), itertools.cycle(COLOURS)))
    height = TOP + 2 * PANEL + GAP + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#1d2733"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>'
    ]
    parts += panel([(run.name, run.losses) for run in runs], at, TOP, "training loss", colours)
    difference = f"distance from “{plain.name}”"
    parts += panel([line for line in apart if line[0] != plain.name], at, TOP + PANEL + GAP, difference, colours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(
    lines: Sequence[tuple[str, Sequence[float]]], at: Sequence[float], top: float, label: str, colours: dict[str, str]
) -> list[str]:
    """Curves over epochs `at` in a box that starts at `top`."""
    known = [value for _, values in lines for value in values if math.isfinite(value)] or [0.0]
    marks = ticks(min(0.0, *known), max(known))
    low, high, last = marks[0], marks[-1], max(at)

    def x(epoch: float) -> float:
        return LEFT + epoch / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + PANEL - (value - low) / (high - low) * PANEL

    names = " · ".join(f'<tspan fill="{colours[name]}">{escape(name)}</tspan>' for name, _ in lines)
    parts = [f'<text x="{LEFT}" y="{top - 9}">{escape(label)}: {names}</text>']
    for mark in marks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#e4e9ee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in ticks(0, last):
        if mark <= last:
            parts.append(f'<text x="{x(mark):.1f}" y="{top + PANEL + 18}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{top + PANEL + 34}" text-anchor="middle">epoch</text>')
    for name, values in reversed(lines):
        path = " ".join(f"{x(e):.1f},{y(v):.1f}" for e, v in zip(at, values, strict=True) if math.isfinite(v))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="1.6"/>')
    return parts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recnet_60_480")
    parser.add_argument("--data", default="cifar10", help="cifar10, cifar100, digits or folder:PATH")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps of one point of a curve")
    parser.add_argument("--plain-runs", type=int, default=2, help="runs without kernels, two or more")
    parser.add_argument("--backend", default="auto", help="the kernels to compare")
    parser.add_argument("--precision", choices=ROUNDING, help="bf16 on a GPU and fp32 elsewhere by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV and the picture")
    args = parser.parse_args()
    if args.plain_runs < 2:
        parser.error(f"--plain-runs must be at least 2, got {args.plain_runs}: the noise is what lies between them")
    return args


def main() -> int:
    args = arguments()
    logging.basicConfig(level=logging.INFO)  # says so where backend "auto" takes plain PyTorch
    device = choose_device(args.device, Processes())
    on_cuda = device.type == "cuda"
    recipe = load_recipe(
        "paper",
        model=args.model,
        data=args.data,
        epochs=args.epochs,
        restarts=(),
        batch_size=args.batch_size,
        seed=args.seed,
        precision=args.precision or ("bf16" if on_cuda else "fp32"),
        channels_last=on_cuda,
        flip=args.data != "digits",
    )
    data = load_dataset(args.data, data_dir=args.data_dir)
    options = RunOptions(device=args.device, backend=args.backend)
    runs = [train("kernels", recipe, options, data, args.every)]
    for i in range(args.plain_runs):
        name = "plain" + (", nudged" if i else "") + (f" ({i})" if i > 1 else "")
        runs.append(train(name, recipe, RunOptions(device=args.device, backend="torch"), data, args.every, nudge=i))

    steps = math.ceil(len(data.train) / recipe.batch_size)
    ends = [min((i + 1) * args.every, recipe.epochs * steps) for i in range(len(runs[0].losses))]
    difference = largest(runs[0], runs[1])
    noise = max(largest(a, b) for a, b in itertools.combinations(runs[1:], 2))
    title = f"{args.model} on {args.data}, {recipe.epochs} epochs, batch {recipe.batch_size}, {recipe.precision}"
    about = "; ".join(f"{r.name} {r.accuracy:.2f} % in {r.seconds:.0f} s" for r in runs)
    times = 0.0 if difference == 0 else difference / noise if noise else math.inf
    verdict = f"largest difference {difference:.4g}, noise {noise:.4g}, {times:.2f} times the noise"
    path = args.out / (file_name("curves", args.model, args.data, recipe.precision, context(device)) + ".csv")
    rows = [{"step": end, **{run.name: f"{run.losses[i]:.9g}" for run in runs}} for i, end in enumerate(ends)]
    write_csv(path, rows, f"{title}; mean training loss of the steps since the row above", f"test: {about}", verdict)
    atomic_write(path.with_suffix(".svg"), draw(runs, [end / steps for end in ends], title))
    print(f"test accuracy: {about}\n{verdict}\n{path}\n{path.with_suffix('.svg')}")
    if difference == 0:
        print("the curves are the same bit for bit: did the kernels run?")
    return 0 if times <= ALLOWED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RecNetsError, ValueError) as error:
        sys.exit(f"error: {error}")
