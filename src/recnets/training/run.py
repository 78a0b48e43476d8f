"""`train`: a run from its recipe to its summary, or from its checkpoint on."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recnets.data import DataSet, load_dataset
from recnets.errors import Misuse, RecNetsError
from recnets.training.checkpoint import Position, check_same_run, fingerprint, load_checkpoint, restore
from recnets.training.distributed import Processes, choose_device, device_name, join_processes, leave_processes
from recnets.training.loop import Diverged, Interrupts, Loop, Outcome
from recnets.training.options import RunOptions
from recnets.training.progress import Display, counted, duration
from recnets.training.recipe import Recipe
from recnets.training.report import write_report
from recnets.training.run_folder import RunFolder, default_run_path, to_json
from recnets.training.session import Session, build_session
from recnets.training.statistics import averaged_accuracy
from recnets.utils import atomic_write, git_commit, require, versions

if TYPE_CHECKING:
    from rich.console import Console

TINY_BATCH = 8192  # pixels; 64 digits of 8 x 8 have 4,096, 64 images of CIFAR 65,536


@dataclass(frozen=True)
class TrainResult:
    """`summary` is what summary.json holds, None where the run stopped before the end of the asked epochs."""

    folder: Path
    outcome: Outcome
    summary: dict[str, Any] | None
    history: list[dict[str, Any]]


def train(
    recipe: Recipe,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    options: RunOptions | None = None,
    data: DataSet | None = None,
    console: Console | None = None,
    command: str | None = None,
) -> TrainResult:
    """Train, or go on with what was interrupted.

    Args:
        out: the run folder; runs/DATE-TIME-MODEL-DATA by default.
        resume: go on from the checkpoint in `out`, or start where there is none yet; without it, a folder that
            holds a run is refused.
        data: a data set already in memory, instead of loading `recipe.data`.
        console: where to show progress; None is silent.
        command: what to record as the command; this process's own by default.
    """
    began = time.monotonic()
    options = options or RunOptions()
    processes = join_processes(options.device)
    threads_before = torch.get_num_threads()
    try:
        path = Path(processes.from_main(str(out if out is not None else default_run_path(recipe))))
        folder = RunFolder(path)
        folder.check(resume)
        if options.tensorboard:
            require("tensorboard", "tensorboard")
        device = choose_device(options.device, processes)
        if data is None:
            data = _load(recipe, options, processes)
        torch.set_num_threads(options.threads or fitting_threads(recipe.batch_size, data.image_size))
        resumed = folder.checkpoint.exists()
        session = build_session(recipe, options, data, device, processes, resumed=resumed)
        if processes.main:
            folder.claim()
        try:
            with Interrupts() as interrupts:  # from the first file on, Ctrl-C leaves a run that can be resumed
                return _run(
                    session,
                    folder,
                    console if processes.main else None,
                    command or own_command(),
                    began,
                    interrupts,
                )
        finally:
            folder.release()
    finally:
        torch.set_num_threads(threads_before)
        leave_processes(processes)


def own_command() -> str:
    """This process's command as one would type it: the folder of the program is of this machine only."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*words, *sys.argv[1:]])


def fitting_threads(batch_size: int, image_size: tuple[int, int]) -> int:
    """One for tiny batches: there, threads mostly wait for each other, and on a busy machine they do so for long."""
    return 1 if batch_size * math.prod(image_size) < TINY_BATCH else torch.get_num_threads()


def _load(recipe: Recipe, options: RunOptions, processes: Processes) -> DataSet:
    def load() -> DataSet:
        return load_dataset(
            recipe.data,
            data_dir=options.data_dir,
            image_size=recipe.image_size,
            val=recipe.val,
            seed=recipe.split_seed,
            download=options.download and processes.main,
            max_bad=options.max_bad,
        )

    try:
        if processes.main:
            data = load()  # may download; the others then find it
        processes.wait()
        return data if processes.main else load()
    except ValueError as error:
        raise Misuse(str(error)) from error


def _run(
    session: Session,
    folder: RunFolder,
    console: Console | None,
    command: str,
    began: float,
    interrupts: Interrupts,
) -> TrainResult:
    recipe, main = session.recipe, session.processes.main
    data_id = fingerprint(session.data)
    position = Position()
    if folder.checkpoint.exists():
        content = load_checkpoint(folder.checkpoint)
        check_same_run(content, recipe, data_id, folder.checkpoint)
        position = restore(session.step, content, folder.checkpoint, main)
    origin = {
        "command": command,
        "commit": git_commit(),
        "device": device_name(session.device),
        "versions": versions(),
    }
    if main:
        started = {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "epoch": position.epoch, "step": position.step}
        settings = {k: str(v.absolute()) if isinstance(v, Path) else v for k, v in asdict(session.options).items()}
        folder.write_config(recipe, {**started, **origin, "processes": session.processes.world, "options": settings})
        folder.rewrite_metrics(position.history)
    session.processes.wait()

    display = Display(
        console, recipe.epochs, session.loader.steps, position.epoch * session.loader.steps + position.step
    )
    display.say(_opening(session, folder, position), style="bold")
    if (session.options.epochs_until or 0) > recipe.epochs:
        asked, whole = session.options.epochs_until, counted(recipe.epochs, "epoch")
        display.say(f"--epochs-until {asked} changes nothing: the recipe ends after {whole}")
    log = _tensorboard(folder, position) if session.options.tensorboard and main else None
    loop = Loop(
        session,
        position,
        folder,
        display,
        data_id=data_id,
        metadata=_metadata(session, origin),
        interrupts=interrupts,
        log=log,
        began=began,
    )
    try:
        outcome = loop.run()
        summary = _finish(loop, origin) if outcome in ("finished", "epochs") else None
    except (Diverged, Misuse):
        raise
    except (RecNetsError, OSError) as error:  # a full disk, say: the last checkpoint is whole
        raise RecNetsError(f"{error}; once that is mended, {_go_on(folder)}") from error
    finally:
        display.close()
    _closing(display, folder, outcome, position, summary, session)
    return TrainResult(folder.path, outcome, summary, position.history)


def _metadata(session: Session, origin: dict[str, Any]) -> dict[str, Any]:
    data, recipe = session.data, session.recipe
    return {
        "dataset": data.name,
        "classes": data.classes,
        "normalisation": {"mean": list(data.mean), "std": list(data.std)},
        "image_size": list(data.image_size),
        "recipe": recipe.to_dict(),
        "max_bad": session.options.max_bad,
        "seed": recipe.seed,
        **{key: origin[key] for key in ("command", "commit", "versions")},
    }


def _finish(loop: Loop, origin: dict[str, Any]) -> dict[str, Any]:
    """Write summary.json and report.html; on a run resumed after its end, the weights are evaluated once more."""
    session, position, folder = loop.session, loop.position, loop.folder
    evaluation = loop.evaluation or session.test(session.judged)
    summary: dict[str, Any] = {
        "model": session.recipe.model,
        "data": session.recipe.data,
        "final_accuracy": evaluation.accuracy,
        "final_top5": evaluation.top5,
        "final_loss": evaluation.loss,
        "finished": position.epoch >= session.recipe.epochs,
        "epochs": position.epoch,
        "seconds": position.seconds,
        "images_per_second": position.images / max(position.train_seconds, 1e-9),
        "input_share": _typical([row["input_share"] for row in position.history]),
        "fetch_share": _typical([row["fetch_share"] for row in position.history if "fetch_share" in row]),
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "train_images": len(session.data.train),
        "test_images": len(session.data.test),
        "seed": session.recipe.seed,
        "precision": session.recipe.precision,
        "processes": session.processes.world,
        **origin,
    }
    if summary["finished"] and session.options.average_batches:
        summary["averaged_accuracy"] = averaged_accuracy(session, session.options.average_batches)
    if position.best is not None:
        summary["best_epoch"], summary["best_val_accuracy"] = position.best["epoch"], position.best["accuracy"]
    if session.processes.main:
        if session.options.report:
            write_report(folder.report, session.recipe, session.data, summary, position.history, evaluation)
        atomic_write(folder.summary, to_json(summary, indent=2) + "\n")
    return summary


def _typical(values: list[float]) -> float | None:
    """The median: the first epoch of a session holds compilation and warm-up."""
    return sorted(values)[len(values) // 2] if values else None


def _tensorboard(folder: RunFolder, position: Position) -> Callable[[dict[str, Any]], None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=position.epoch + 1)

    def log(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "epoch":
                writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    return log


def _opening(session: Session, folder: RunFolder, position: Position) -> str:
    parameters = sum(p.numel() for p in session.model.parameters())
    steps = session.loader.steps
    text = (
        f"{session.recipe.model} ({parameters:,} parameters) on {session.recipe.data} "
        f"({len(session.data.train):,} images), {device_name(session.device)}, in {folder.path}"
    )
    if session.start:
        text += f"; {session.start}"
    if position.epoch == session.recipe.epochs:
        text += f"; it ended after {counted(position.epoch, 'epoch')}, nothing is left to train"
    elif position.epoch or position.step:
        where = f"step {position.step} of {steps} in " if position.step else ""
        text += f"; going on from {where}epoch {position.epoch + 1}"
    return text


def _go_on(folder: RunFolder) -> str:
    return f"go on with: recnet train --resume {shlex.quote(str(folder.path))}"


def _closing(
    display: Display,
    folder: RunFolder,
    outcome: Outcome,
    position: Position,
    summary: dict[str, Any] | None,
    session: Session,
) -> None:
    if summary is not None:
        display.say(
            f"test accuracy {summary['final_accuracy']:.2f} % after {counted(position.epoch, 'epoch')} in "
            f"{duration(position.seconds)} ({summary['images_per_second']:,.0f} images/s)",
            style="bold green",
        )
        written = folder.report if session.options.report else folder.summary
        display.say(f"weights {folder.last}, report {written}")
    if outcome != "finished":
        reason = {"interrupted": "interrupted", "time": "time is up", "epochs": "stopped as asked"}[outcome]
        at = f"epoch {position.epoch + 1}, step {position.step} of {session.loader.steps}"
        if position.step == 0:
            at = f"the end of epoch {position.epoch}"
        display.say(f"{reason} at {at}; {_go_on(folder)}")
