"""What the ledger lacks, how long it will take, and the order that finishes the most rows early."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional

from recnets.experiments.cost import SHAPES, Cost, build, cost
from recnets.experiments.ledger import Ledger, read_metrics
from recnets.experiments.runs import Place, Run, distinct
from recnets.training import RunFolder
from recnets.training.run import TINY_BATCH, fitting_threads

State = Literal["done", "failed", "interrupted", "new"]
TRAIN_IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "digits": 1_437}
EVALUATION = 1.07  # an epoch with its evaluation, as a multiple of its training: a fifth of the images, forward only


@dataclass(frozen=True)
class Pace:
    """A measured speed: seconds an epoch, evaluation included."""

    dataset: str
    family: str
    network: str
    macs: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """A run of the plan. `rows` wait for it; `seconds` is the estimate for what remains of it."""

    run: Run
    rows: int
    state: State
    epochs_done: int
    cost: Cost
    seconds: float = 0.0
    basis: str = ""
    reason: str = ""


def make_plan(found: Sequence[Place], ledger: Ledger, work: Path) -> list[Step]:
    """Every run of these places with its state, not yet timed, in the places' order."""
    rows = Counter(run.name for place in found for run in place.runs)
    entries, failed = ledger.entries(), ledger.failed()
    steps = []
    for run in distinct(found):
        epochs_done, state, reason = 0, "new", ""
        if ledger.done(run, entries):
            epochs_done, state = run.recipe.epochs, "done"
        else:
            epochs_done = len(read_metrics(RunFolder(work / run.name)))
            if run.name in failed:
                state, reason = "failed", failed[run.name]["reason"]
            elif (work / run.name / "checkpoint.pt").exists():
                state = "interrupted"
        price = cost(run.model, run.overrides, run.dataset)
        steps.append(Step(run, rows[run.name], state, epochs_done, price, reason=reason))  # type: ignore[arg-type]
    return steps


def measured(ledger: Ledger, work: Path, steps: Iterable[Step], device: str) -> list[Pace]:
    """Speeds on this device: of the ledger's runs, and of those that were begun."""
    entries = [entry for entry in ledger.entries().values() if entry["device"] == device]
    found = [_pace(e["dataset"], e["model"], e["overrides"], e["macs"], _epoch_seconds(e["epochs"])) for e in entries]
    for step in steps:
        rows = read_metrics(RunFolder(work / step.run.name)) if step.state == "interrupted" else []
        if len(rows) > 1:  # the first epoch holds the warm-up
            run = step.run
            found.append(_pace(run.dataset, run.model, run.overrides, step.cost.macs, _epoch_seconds(rows)))
    return found


def _epoch_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """The median epoch: some hold a start, and a GPU may have been shared for a while."""
    ends = [row["seconds"] for row in rows]
    return statistics.median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else float(ends[0])


def _pace(dataset: str, model: str, overrides: Mapping[str, Any], macs: int, seconds: float) -> Pace:
    return Pace(dataset, family_of(model), f"{model} {sorted(overrides.items())}", macs, seconds)


def family_of(model: str) -> str:
    return "recnet" if model.lower().startswith("recnet") else "other"


def time_a_step(run: Run, device: torch.device, threads: int | None = None) -> Pace:
    """Where nothing was measured yet: a few training steps, timed here and now with the threads of training."""
    classes, channels, side = SHAPES[run.dataset]
    batch, before = run.recipe.batch_size, torch.get_num_threads()
    torch.set_num_threads(threads or fitting_threads(batch, (side, side)))
    if device.type == "cpu":  # of larger images a few: there, time grows with their number
        batch = min(batch, max(16, TINY_BATCH // side**2))
    network = build(run.model, run.overrides, run.dataset, "cpu").to(device).train()
    images = torch.randn(batch, channels, side, side, device=device)
    labels = torch.randint(classes, (batch,), device=device)

    def step() -> float:
        loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        return loss.item()  # waits for the device

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    try:
        step()
        seconds = min(timed(), timed()) / batch * TRAIN_IMAGES[run.dataset] * EVALUATION
    finally:
        torch.set_num_threads(before)
    return _pace(run.dataset, run.model, run.overrides, cost(run.model, run.overrides, run.dataset).macs, seconds)


def with_times(
    steps: Sequence[Step], paces: Sequence[Pace], device: torch.device | None = None, threads: int | None = None
) -> list[Step]:
    """The plan with an estimate for what remains of every run.

    A measured run of the same network is taken as it is; else the nearest in size (of its own family if there is
    one) is scaled by multiply-adds; with nothing measured and a `device`, a few steps are timed there.
    `threads` are those of a run, where they are not training's own choice.
    """
    todo = [step for step in steps if step.state != "done"]
    paces = list(paces)
    if not paces and device is not None:
        for family in sorted({family_of(step.run.model) for step in todo}):
            sizes = sorted((s for s in todo if family_of(s.run.model) == family), key=lambda s: s.cost.macs)
            run = sizes[len(sizes) // 4].run  # a smaller one: quick to time, and typical enough
            paces.append(time_a_step(run, device, threads))
    return [step if step.state == "done" or not paces else _timed(step, paces) for step in steps]


def _timed(step: Step, paces: Sequence[Pace]) -> Step:
    run, left = step.run, step.run.recipe.epochs - step.epochs_done
    own = _pace(run.dataset, run.model, run.overrides, step.cost.macs, 0.0)

    def distance(pace: Pace) -> tuple[bool, bool, float, float]:
        # Of several, the fastest: the others were short, or shared the device.
        size = abs(math.log(pace.macs / own.macs))
        return pace.network != own.network, pace.family != own.family, size, pace.seconds

    best = min(paces, key=distance)
    scale = (own.macs / best.macs) * TRAIN_IMAGES[own.dataset] / TRAIN_IMAGES[best.dataset]
    same = best.network == own.network and best.dataset == own.dataset
    basis = "measured" if same else f"scaled from {best.network.split(' [')[0]}"
    return replace(step, seconds=left * best.seconds * (1.0 if same else scale), basis=basis)


def ordered(steps: Iterable[Step]) -> list[Step]:
    """What is to be done, so that rows finish as early as they can: first seeds first, then least time a row."""
    todo = [step for step in steps if step.state != "done"]
    return sorted(todo, key=lambda step: (step.run.seed, step.seconds / max(step.rows, 1)))
