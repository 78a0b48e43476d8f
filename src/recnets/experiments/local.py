"""The local engine: a process a run, a few side by side on this machine."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from recnets.errors import RecNetsError
from recnets.experiments.job import Job, Result, result_of, start, stop

POLL = 0.2
LEAST = 5.0  # seconds: with less left, a run would not get past its start


class Watcher(Protocol):
    """Who is told what happens; `ended` also keeps the results, and `lets` is asked before a job is started."""

    def lets(self, job: Job) -> bool: ...

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, result: Result) -> None: ...

    def tick(self) -> None: ...


def run_jobs(jobs: Sequence[Job], devices: Sequence[str], watcher: Watcher, deadline: float | None = None) -> None:
    """Carry out jobs in their order, one on each of `devices` at a time (the same device may stand there twice).

    None is started with the `deadline` (a time.time()) near.

    Whatever interrupts this, the runs under way save a checkpoint before it passes on.
    """
    waiting, free = deque(jobs), list(devices)
    running: dict[str, tuple[Job, str, subprocess.Popen[bytes]]] = {}
    try:
        while True:
            while free and time_left(deadline) and (job := pick(waiting, watcher)) is not None:
                try:
                    process = start(replace(job, options={**job.options, "device": free[0]}))
                except RecNetsError as error:
                    watcher.ended(job, {"status": "failed", "reason": str(error)})
                    continue
                running[job.name] = job, free.pop(0), process
                watcher.started(job)
            if not running:
                return
            for job, device, process in list(running.values()):
                if process.poll() is not None:
                    del running[job.name]
                    free.append(device)
                    watcher.ended(job, result_of(job, process))
            watcher.tick()
            time.sleep(POLL)
    except BaseException:
        stop([process for _, _, process in running.values()])
        for job, _, process in running.values():
            result = result_of(job, process)  # one may have finished just now
            watcher.ended(job, {"status": "interrupted"} if result["status"] == "lost" else result)
        raise


def pick(waiting: deque[Job], watcher: Watcher) -> Job | None:
    """Take out the first that may be started; None where there is none."""
    for job in waiting:
        if watcher.lets(job):
            waiting.remove(job)
            return job
    return None


def time_left(deadline: float | None) -> bool:
    """Is there enough time for a run to start?"""
    return deadline is None or time.time() + LEAST < deadline
