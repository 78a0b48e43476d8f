"""`recnet reproduce`: what is asked for, the plan, the engine, and the ledger in between."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch

from recnets.errors import RecNetsError
from recnets.experiments import local, ray_engine
from recnets.experiments.board import STATES, Board, duration
from recnets.experiments.cost import build
from recnets.experiments.job import Job, Result
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import DATASETS, PAPER_TABLES, TABLES
from recnets.experiments.plan import Step, family_of, make_plan, measured, ordered, with_times
from recnets.experiments.runs import Place, Protocol, Run, distinct, places
from recnets.models.registry import canonical_name
from recnets.training.distributed import Processes, choose_device, device_name
from recnets.training.options import RunOptions
from recnets.training.progress import counted
from recnets.training.recipe import parse_options
from recnets.utils import choose, did_you_mean, terminable

AVERAGE_BATCHES = 100  # of BN's statistics, for the ledger's second accuracy
MARGIN = 10.0  # seconds before --max-seconds in which runs under way save their checkpoints


@dataclass(frozen=True)
class Reproduce:
    """Run the rows of the paper's tables that the ledger lacks, and go on with those that were interrupted.

    With no arguments: every row of Tables 1, 2 and 3 on both data sets. `--dry-run` lists them with their sizes and
    the time they will take; `--table demo` is a table of a minute on the embedded digits.
    """

    table: tuple[str, ...] = ()
    """Tables: 1 (all of it), 1a, 1b, 1c, 1d, 2, 3; heads and demo besides the paper's."""
    dataset: tuple[str, ...] = ()
    """Data sets: cifar10, cifar100, digits; each table's own by default."""
    seeds: int = 1
    """Runs of every row, with seeds 0, 1, ..."""
    only: tuple[str, ...] = ()
    """Only these: names of runs, patterns for them ('*relu*'), or names of models."""
    dry_run: bool = False
    """List what would be run, and run nothing."""
    recipe: str | None = None
    """A recipe by name, or a TOML file, instead of each table's own."""
    set: tuple[str, ...] = ()
    """Settings that differ from the recipe, KEY=VALUE each: precision=bf16 epochs=20."""

    engine: Literal["local", "ray"] = "local"
    """Processes on this machine, or the tasks of a Ray cluster."""
    jobs: int = 1
    """Runs side by side: on this machine with the local engine, on each GPU with Ray."""
    ray_address: str | None = None
    """Address of a running Ray cluster; by default Ray is started on this machine."""
    max_seconds: float | None = None
    """Stop after this long, every run with a checkpoint to go on from."""
    whole: bool = False
    """Begin only runs that are expected to end before --max-seconds, for machines that keep nothing."""
    epochs_until: int | None = None
    """Stop every run after this epoch of its schedule; later calls go on."""
    results: Path = Path("results")
    """Folder of the ledger."""
    work: Path = Path("runs/reproduce")
    """Folder of the run folders, with logs, checkpoints and weights."""

    data_dir: Path | None = None
    """Folder with the data sets; RECNETS_DATA, else a cache folder."""
    no_download: bool = False
    """Do not fetch a missing data set from its makers."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto shares the runs out among the GPUs there are."""
    backend: str = "auto"
    """Implementation of the recurrence in RecNets: auto, torch or triton."""
    compile: bool = False
    """Compile the models with torch.compile."""
    threads: int | None = None
    """CPU threads of a run; by default the cores are shared out among the runs."""
    eval_every: int = 1
    """Evaluate every so many epochs (the last always)."""

    def __post_init__(self) -> None:
        RunOptions(**self.options)  # every run would fail over what it refuses
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_seconds is not None and self.max_seconds <= MARGIN:
            raise ValueError(f"max_seconds must be more than {MARGIN:g}, got {self.max_seconds}")
        if self.whole and self.max_seconds is None:
            raise ValueError("whole is about the runs that end before max_seconds: give both")
        choose(self.engine, ("local", "ray"), "engine")
        for dataset in self.dataset:
            choose(dataset, DATASETS, "dataset")

    def run(self) -> int:
        return reproduce(self)

    @property
    def options(self) -> dict[str, Any]:
        """What of this every run is given, as options of `RunOptions`."""
        return {
            "data_dir": None if self.data_dir is None else str(self.data_dir.expanduser().resolve()),
            "download": not self.no_download,
            "device": self.device,
            "backend": self.backend,
            "compile": self.compile,
            "threads": self.threads,
            "epochs_until": self.epochs_until,
            "eval_every": self.eval_every,
            "average_batches": AVERAGE_BATCHES,
        }

    @property
    def protocol(self) -> Protocol:
        return Protocol.of(self.recipe, parse_settings(self.set))


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`["precision=bf16", "epochs=20"]` as a dict; values are JSON where they can be, else text."""
    settings = parse_options(list(words))
    for key in ("model", "model_options", "data", "seed"):
        if key in settings:
            raise ValueError(f"set cannot change {key}: the tables decide it (see --table, --dataset, --seeds, --only)")
    return settings


def table_names(wanted: Sequence[str], *, extra: bool = False) -> list[str]:
    """Tables by name; "1" is all of Table 1, nothing is all of the paper's (with `extra`, all there are)."""
    if not wanted:
        return list(TABLES if extra else PAPER_TABLES)
    names = [["1a", "1b", "1c", "1d"] if name == "1" else [choose(name, TABLES, "table")] for name in wanted]
    return list(dict.fromkeys(name for group in names for name in group))


def chosen_places(request: Reproduce) -> list[Place]:
    """The rows that are asked for, each with its runs."""
    tables = table_names(request.table, extra=bool(request.only))
    found = places(tables, request.dataset or None, request.seeds, request.protocol)
    if not request.only:
        return found
    runs = distinct(found)
    wanted: set[str] = set()
    for pattern in request.only:
        matches = {run.name for run in runs if _matches(run, pattern)}
        if not matches:
            near = did_you_mean(pattern, [*(r.name for r in runs), *(r.model for r in runs)])
            raise ValueError(f"only {pattern!r} is no run of these tables{near} (--dry-run lists them)")
        wanted |= matches
    kept = [
        Place(place.table, place.row, place.dataset, tuple(run for run in place.runs if run.name in wanted))
        for place in found
    ]
    return [place for place in kept if place.runs]


def _matches(run: Run, pattern: str) -> bool:
    return run.model == canonical_name(pattern) or fnmatch.fnmatchcase(run.name, pattern)


def reproduce(request: Reproduce) -> int:
    """Do what is asked; 1 if a run failed, else 0."""
    began = time.time()
    found, ledger = chosen_places(request), Ledger(request.results)
    device = choose_device(request.device, Processes())
    if request.engine == "local":  # a backend that cannot run here is no reason to fail row by row
        build("recnet_60_480", {"backend": request.backend}, "cifar100")
    steps = make_plan(found, ledger, request.work)
    waiting = sum(step.state != "done" for step in steps)
    paces = measured(ledger, request.work, steps, device_name(device))
    # Estimates put runs in order and are shown in a listing; a single run tells its own pace soon enough.
    steps = with_times(
        steps, paces, device if request.dry_run or request.whole or waiting > 1 else None, _threads(request)
    )
    if request.dry_run:
        print(listing(found, steps, device_name(device)))
        return 0
    todo = ordered(steps)
    done = len(steps) - len(todo)
    print(
        f"{counted(len(found), 'row')}, {counted(len(steps), 'run')}: {done} in {ledger.runs}, {len(todo)} to do",
        flush=True,
    )
    if not todo:
        return 0
    deadline = None if request.max_seconds is None else began + request.max_seconds - MARGIN
    commands = {run.name: command_for(request, place, run) for place in found for run in place.runs}
    jobs = [_job(request, step.run, commands[step.run.name], deadline) for step in todo]
    papers = {run.name: place.row.accuracy.get(place.dataset) for place in found for run in place.runs}
    with _only_one(request.work), terminable():
        ledger.check_writable()
        devices = _devices(request, len(jobs))
        until = deadline if request.whole else None
        board = Board(todo, papers, request.work, len(devices), lambda *ended: _keep(ledger, *ended), until)
        try:
            if request.engine == "ray":
                ray_engine.run_jobs(
                    jobs,
                    board,
                    address=request.ray_address,
                    per_gpu=request.jobs,
                    cpus=_ray_cpus(request),
                    deadline=deadline,
                )
            else:
                local.run_jobs(jobs, devices, board, deadline)
        finally:
            board.close()
            _closing(board)
    return 1 if board.failures else 0


def _keep(ledger: Ledger, job: Job, result: Result) -> Result:
    """Into the ledger with it; an entry that does not pass the ledger's checks is a failure too."""
    if result["status"] == "finished":
        try:
            ledger.add(result["entry"])
        except ValueError as error:
            result = {"status": "failed", "reason": str(error)}
    if result["status"] in ("failed", "lost"):
        ledger.add_failure(job.run, result.get("reason", ""), job.command)
    return result


def _closing(board: Board) -> None:
    for line in board.failures:
        board.say(f"failed: {line.step.run.name}: {line.reason}")
    stopped = [line for line in board.unfinished if line.state != "epochs"]
    if stopped:
        names = ", ".join(f"{line.step.run.name} ({STATES[line.state]})" for line in stopped[:4])
        more = f" and {len(stopped) - 4} more" if len(stopped) > 4 else ""
        board.say(f"{counted(len(stopped), 'run')} left: {names}{more}; the same command goes on")


def command_for(request: Reproduce, place: Place, run: Run) -> str:
    """The command that runs this one row again."""
    words = ["recnet", "reproduce", "--only", run.name, "--table", place.table, "--dataset", place.dataset]
    if run.seed:
        words += ["--seeds", str(run.seed + 1)]
    if request.recipe is not None:
        words += ["--recipe", request.recipe]
    if request.set:
        words += ["--set", *request.set]
    return shlex.join(words)


def _job(request: Reproduce, run: Run, command: str, deadline: float | None) -> Job:
    options = {**request.options, "threads": _threads(request)}
    if family_of(run.model) != "recnet":
        options["backend"] = "auto"  # the others have no recurrence to choose one for
    folder = str((request.work / run.name).resolve())
    return Job(run.name, run.recipe.to_dict(), run.recipe_name, folder, command, options, deadline)


def _threads(request: Reproduce) -> int | None:
    """Those asked for, else cores for each run on the CPU; on a GPU the default does."""
    if request.threads is not None:
        return request.threads
    if request.engine == "ray":
        return 1  # a task has one core of its node
    on_cpu = choose_device(request.device, Processes()).type == "cpu"
    return max(1, _cores() // request.jobs) if on_cpu and request.jobs > 1 else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ray_cpus(request: Reproduce) -> int | None:
    """Workers of a Ray started here, where there is no GPU to share out: --jobs."""
    return None if torch.cuda.is_available() else max(request.jobs, 1)


def _devices(request: Reproduce, jobs: int) -> list[str]:
    """A device for each run side by side."""
    gpus = torch.cuda.device_count() if request.device == "auto" else 0
    names = [f"cuda:{i % gpus}" if gpus > 1 else request.device for i in range(request.jobs)]
    return names[: max(jobs, 1)]


@contextlib.contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Keep a second `recnet reproduce` out of the same folder; the lock goes with the process, however it ends."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock: IO[str] = open(work / ".lock", "w")  # noqa: SIM115 (held open: that is the lock)
    except OSError as error:
        raise RecNetsError(f"cannot write to {work}: {error.strerror or error}") from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows: no lock, but all else works
            pass
        except OSError as error:
            raise RecNetsError(f"another recnet reproduce is at work in {work}; choose another --work") from error
        yield


def listing(found: Sequence[Place], steps: Sequence[Step], device: str) -> str:
    """The text of --dry-run: every row, with its run's size, state and time."""
    by_name: Mapping[str, Step] = {step.run.name: step for step in steps}
    lines, shown, section = [], set[str](), ("", "")
    width = max(len(run.name) for place in found for run in place.runs)
    for place in found:
        if section != (place.table, place.dataset):
            section = (place.table, place.dataset)
            lines.append(f"\n{TABLES[place.table].title}, {DATASETS[place.dataset]}")
        for run in place.runs:
            step = by_name[run.name]
            time_left = "" if step.state == "done" else f"{duration(step.seconds)} ({step.basis})"
            if run.name in shown:
                time_left = "the same run as above"
            shown.add(run.name)
            size = f"{step.cost.parameters:>11,} parameters {step.cost.macs / 1e6:>8,.1f} M mult-adds"
            state = f"failed: {step.reason}" if step.state == "failed" else step.state
            lines.append(f"  {run.name:{width}} {size}  {state:11}  {time_left}".rstrip())
    todo = ordered(steps)
    total = sum(step.seconds for step in todo)
    lines.append(
        f"\n{counted(len(found), 'row')}, {counted(len(steps), 'run')}, {len(steps) - len(todo)} done; "
        f"about {duration(total)} on {device}, one run at a time"
    )
    if todo:
        lines.append("first: " + ", ".join(step.run.name for step in todo[:5]))
    return "\n".join(lines).lstrip("\n")
