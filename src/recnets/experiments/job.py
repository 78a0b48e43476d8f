"""A job: a run to carry out somewhere, as plain data, and the process that carries it out.

Every run has a process of its own, `python -m recnets.experiments.job JOB.json`: a crash or a full GPU ends that run
and no other. It writes `outcome.json` into the run's folder. When whoever started it is gone (SIGKILL, a lost
worker), it saves a checkpoint and stops.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from recnets.errors import RecNetsError
from recnets.experiments.ledger import entry_from_folder
from recnets.experiments.runs import Run
from recnets.training import RunFolder, RunOptions, recipe_from_dict, train
from recnets.utils import atomic_write

LOCK_WAIT = 60.0  # a process whose parent is gone needs a moment to save and let go of its folder


class Result(TypedDict, total=False):
    """`status`: finished (with `entry`), failed (with `reason`), or why the run stopped: epochs, time, interrupted."""

    status: str
    reason: str
    entry: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """`deadline` is a time.time(); `options` are those of `RunOptions`."""

    name: str
    recipe: dict[str, Any]
    recipe_name: str
    folder: str
    command: str
    options: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None

    @property
    def run(self) -> Run:
        return Run(self.name, recipe_from_dict(self.recipe, source=self.name), self.recipe_name)

    @property
    def outcome(self) -> Path:
        return Path(self.folder) / "outcome.json"


def perform(job: Job) -> Result:
    """Train in this process; failures come back as a reason, whatever they are."""
    try:
        options = dict(job.options)
        if job.deadline is not None:
            options["max_seconds"] = max(job.deadline - time.time(), 0.1)
        if options.get("data_dir") is not None:
            options["data_dir"] = Path(options["data_dir"])
        folder = RunFolder(job.folder)
        _wait_for(folder)
        if _has_ended(folder, job.run):  # nothing to train: only its ledger entry is missing
            return {"status": "finished", "entry": entry_from_folder(job.run, folder.path, job.command)}
        result = train(job.run.recipe, out=job.folder, resume=True, options=RunOptions(**options), command=job.command)
        if result.outcome != "finished":
            return {"status": result.outcome}
        return {"status": "finished", "entry": entry_from_folder(job.run, folder.path, job.command)}
    except RecNetsError as error:
        return {"status": "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        if type(error).__name__ == "OutOfMemoryError":
            return {"status": "failed", "reason": f"out of memory: {first}"}
        return {"status": "failed", "reason": f"{type(error).__name__}: {first}".rstrip(": ")}


def _has_ended(folder: RunFolder, run: Run) -> bool:
    """Is this run's summary written? Training it again would only evaluate, and put this machine in the summary."""
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary.get("finished")) and folder.read_recipe() == run.recipe


def _wait_for(folder: RunFolder) -> None:
    until = time.monotonic() + LOCK_WAIT
    while True:
        try:
            folder.claim()
            folder.release()
            return
        except RecNetsError as error:
            if "another process" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.5)


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start a job's process, in a session of its own: a Ctrl-C at the terminal is for its parent to pass on."""
    folder = Path(job.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        job.outcome.unlink(missing_ok=True)
        path = folder / "job.json"
        atomic_write(path, json.dumps(asdict(job), indent=1))
        with open(folder / "log.txt", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "recnets.experiments.job", str(path), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RecNetsError(f"cannot start {job.name} in {folder}: {error.strerror or error}") from error


def result_of(job: Job, process: subprocess.Popen[bytes]) -> Result:
    """What a process that has ended leaves: its own word, or how it died."""
    try:
        return Result(**json.loads(job.outcome.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    log = Path(job.folder) / "log.txt"
    code = process.returncode
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    else:
        how = f"ended with status {code}"
    return {"status": "lost", "reason": f"the run's process was {how}; see {log}" if code < 0 else f"{how}; see {log}"}


def stop(processes: list[subprocess.Popen[bytes]], grace: float = 60.0) -> None:
    """Let processes save and end; kill those that do not within `grace` seconds."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _follow(parent: int) -> None:
    """End like on Ctrl-C (a checkpoint, then out) once the parent is gone; at once if that takes too long."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LOCK_WAIT / 2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(path: str, parent: str) -> int:
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    _follow(int(parent))
    result = perform(job)
    atomic_write(job.outcome, json.dumps(result))
    return 1 if result["status"] == "failed" else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
