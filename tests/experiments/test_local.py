"""The local engine's order, slots and deadline, with processes that only sleep; and what the board says of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recnets.errors import RecNetsError
from recnets.experiments import local
from recnets.experiments.board import Board, duration
from recnets.experiments.job import Job
from recnets.experiments.ledger import Ledger
from recnets.experiments.plan import make_plan
from recnets.experiments.runs import Protocol, places

SLEEP = "import time, sys; time.sleep(0.1); open(sys.argv[1], 'w').write('{\"status\": \"epochs\"}')"


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.most = self.now = 0
        self.refused: set[str] = set()

    def lets(self, job: Job) -> bool:
        return job.name not in self.refused

    def started(self, job: Job) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.events.append(("start", job.name))

    def ended(self, job: Job, result) -> None:
        self.now -= 1 if ("start", job.name) in self.events else 0
        self.events.append((result["status"], job.name))

    def tick(self) -> None:
        pass


def jobs_in(folder: Path, count: int) -> list[Job]:
    return [Job(f"run-{i}", {}, "quick", str(folder / f"run-{i}"), "recnet reproduce") for i in range(count)]


@pytest.fixture
def devices(monkeypatch):
    """Replaces a job's process; what device each was given is noted."""
    given: dict[str, str] = {}

    def start(job: Job) -> subprocess.Popen[bytes]:
        if job.name == "run-1":
            raise RecNetsError("no room")
        given[job.name] = job.options["device"]
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        return subprocess.Popen([sys.executable, "-c", SLEEP, str(job.outcome)])

    monkeypatch.setattr(local, "start", start)
    return given


def test_side_by_side_in_order_and_a_job_that_cannot_start(tmp_path, devices):
    log = Log()
    local.run_jobs(jobs_in(tmp_path, 5), ["cuda:0", "cuda:1"], log)
    assert [name for kind, name in log.events if kind == "start"] == ["run-0", "run-2", "run-3", "run-4"]
    assert sorted(name for kind, name in log.events if kind == "epochs") == ["run-0", "run-2", "run-3", "run-4"]
    assert ("failed", "run-1") in log.events
    assert log.most == 2
    assert set(devices.values()) == {"cuda:0", "cuda:1"}


def test_nothing_is_started_near_the_deadline(tmp_path, devices):
    log = Log()
    local.run_jobs(jobs_in(tmp_path, 3), ["cpu"], log, deadline=time.time() + 1)
    assert log.events == []


def test_what_may_not_start_is_passed_over(tmp_path, devices):
    log = Log()
    log.refused = {"run-0", "run-3"}
    local.run_jobs(jobs_in(tmp_path, 5), ["cpu"], log)
    assert [name for kind, name in log.events if kind == "start"] == ["run-2", "run-4"]
    log = Log()
    log.refused = {"run-0", "run-2"}
    local.run_jobs([job for job in jobs_in(tmp_path, 3) if job.name != "run-1"], ["cpu"], log)
    assert log.events == []


def test_an_interrupt_stops_the_processes_first(tmp_path, devices, monkeypatch):
    log = Log()
    monkeypatch.setattr(log, "tick", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        local.run_jobs(jobs_in(tmp_path, 1), ["cpu"], log)
    assert log.events == [("start", "run-0"), ("interrupted", "run-0")]


def test_the_board_keeps_results_and_knows_the_time_left(tmp_path, capsys, monkeypatch):
    steps = make_plan(places(["demo"], None, 1, Protocol.of(None)), Ledger(tmp_path), tmp_path)
    kept = []
    board = Board(steps, {steps[0].run.name: 50.0}, tmp_path, 1, lambda job, result: kept.append(result) or result)
    jobs = [Job(s.run.name, s.run.recipe.to_dict(), "quick", str(tmp_path / s.run.name), "x") for s in steps]
    board.started(jobs[0])
    Path(jobs[0].folder).mkdir()
    row = {"epoch": 5, "test_accuracy": 40.0, "images_per_second": 100.0}
    (Path(jobs[0].folder) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("recnets.experiments.board.PLAIN_EVERY", 0.0)
    board.tick()
    assert f"epoch 5/{steps[0].run.recipe.epochs} 40.00 %" in capsys.readouterr().out
    assert board.left() > 0
    board.ended(jobs[0], {"status": "finished", "entry": {"final_accuracy": 51.5}})
    board.ended(jobs[1], {"status": "failed", "reason": "out of memory"})
    board.ended(jobs[2], {"status": "time"})
    board.close()
    out = capsys.readouterr().out
    assert "51.50 % (paper 50.00)" in out
    assert f"FAILED {jobs[1].name}: out of memory" in out
    assert "time is up" in out
    assert [result["status"] for result in kept] == ["finished", "failed", "time"]
    assert ([line.step.run.name for line in board.failures], board.left()) == ([jobs[1].name], 0.0)


def test_only_what_ends_in_time_is_begun(tmp_path, monkeypatch):
    """By the estimate, and by how much longer than theirs the runs of this call take."""
    steps = make_plan(places(["demo"], None, 1, Protocol.of(None)), Ledger(tmp_path), tmp_path)
    steps = [dataclasses.replace(step, seconds=100.0) for step in steps]
    steps[2] = dataclasses.replace(steps[2], epochs_done=1)
    jobs = [Job(s.run.name, s.run.recipe.to_dict(), "quick", str(tmp_path / s.run.name), "x") for s in steps]

    def board(until: float | None) -> Board:
        return Board(steps, {}, tmp_path, 1, lambda job, result: result, until)

    now = time.time()
    assert [board(now + 110).lets(job) for job in jobs] == [True, True, True]
    assert [board(now + 90).lets(job) for job in jobs] == [False, False, True]  # the last was begun before
    assert [board(None).lets(job) for job in jobs] == [True, True, True]
    slow = board(now + 250)
    assert slow.lets(jobs[1])
    slow.started(jobs[0])
    line = slow.lines[jobs[0].name]
    line.began -= 150.0  # half of its epochs, in three times what was expected
    line.epoch = steps[0].run.recipe.epochs // 2
    assert not slow.lets(jobs[1])


def test_the_live_table(tmp_path):
    pytest.importorskip("rich")
    from rich.console import Console

    steps = make_plan(places(["demo"], None, 1, Protocol.of(None)), Ledger(tmp_path), tmp_path)
    board = Board(steps, {}, tmp_path, 1, lambda job, result: result)
    job = Job(steps[0].run.name, steps[0].run.recipe.to_dict(), "quick", str(tmp_path), "x")
    board.ended(job, {"status": "failed", "reason": "the loss is not a number"})
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(board._table())
    text = console.export_text()
    assert "2 waiting, 1 failed" in text
    assert "failed: the loss is not a number" in text
    assert f"0/{steps[0].run.recipe.epochs}" in text


@pytest.mark.parametrize(("seconds", "text"), [(7.2, "7 s"), (600, "10 min"), (9000, "2.5 h")])
def test_duration(seconds, text):
    assert duration(seconds) == text
