"""The Ray engine: the same jobs spread over a cluster, a run a task, results gathered by the driver.

A task starts the job's process on its node, as the local engine does, and sends back what the process leaves. When
a worker or a node is lost, Ray runs the task again; where its folder is still there (the same node, or a shared
disk), the run goes on from its checkpoint, else it starts over. Only the driver writes the ledger.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from recnets.experiments.job import Job, Result, result_of, start, stop
from recnets.experiments.local import Watcher, pick, time_left
from recnets.utils import require

RETRIES = 3
POLL = 0.5


class LostRunError(RuntimeError):
    """The run's process died without a word; the task is worth another try."""


def carry_out(job: Job) -> Result:
    """The body of a task: one job in a process of its own on this node."""
    process = start(job)
    try:
        while process.poll() is None:
            time.sleep(POLL)
    except BaseException:
        stop([process])
        raise
    result = result_of(job, process)
    if result["status"] == "lost":
        raise LostRunError(result["reason"])
    return result


def run_jobs(
    jobs: Sequence[Job],
    watcher: Watcher,
    *,
    address: str | None = None,
    per_gpu: int = 1,
    cpus: int | None = None,
    deadline: float | None = None,
) -> None:
    """Carry out jobs on a Ray cluster.

    Args:
        address: of a running cluster ("auto", "ray://…"); None starts Ray on this machine.
        per_gpu: runs side by side on a GPU; in a cluster without GPUs a run takes a CPU core.
        cpus: workers of a Ray that is started here; all cores by default.
    """
    ray: Any = require("ray", "ray")
    own = not ray.is_initialized()
    if own:
        local = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        _run_all(ray, deque(jobs), watcher, per_gpu, deadline)
    finally:
        if own:
            ray.shutdown()


def _run_all(ray: Any, waiting: deque[Job], watcher: Watcher, per_gpu: int, deadline: float | None) -> None:
    """As many tasks at a time as the cluster has room for, which may change while this works."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    needs = {"num_gpus": 1 / per_gpu} if has_gpus else {"num_cpus": 1}
    task = ray.remote(max_retries=RETRIES, retry_exceptions=[LostRunError], **needs)(carry_out)
    pending: dict[Any, Job] = {}
    try:
        while True:
            resources = ray.cluster_resources()
            room = int(resources.get("GPU", 0) * per_gpu) if has_gpus else int(resources.get("CPU", 1))
            while len(pending) < max(room, 1) and time_left(deadline) and (job := pick(waiting, watcher)) is not None:
                pending[task.options(name=job.name).remote(job)] = job
                watcher.started(job)
            if not pending:
                return
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL)
            for reference in ready:
                watcher.ended(pending[reference], _result(ray, reference))
                del pending[reference]
            watcher.tick()
    except BaseException:
        for reference in pending:
            ray.cancel(reference)  # as Ctrl-C in the task: its run saves a checkpoint
        ray.wait(list(pending), num_returns=len(pending), timeout=30.0)
        for job in pending.values():
            watcher.ended(job, {"status": "interrupted"})
        raise


def _result(ray: Any, reference: Any) -> Result:
    try:
        return Result(**ray.get(reference))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        return {"status": "failed", "reason": f"lost {RETRIES + 1} times: {reason}"}
