"""The same table through a real Ray with two CPU workers, one of which is killed in the middle of a run."""

from __future__ import annotations

import os
import signal
import threading
import time
import tomllib
from pathlib import Path

import pytest

from recnets.experiments.ledger import Ledger, read_metrics
from recnets.experiments.reproduce import Reproduce, reproduce
from recnets.training import RunFolder

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'recnets[ray]')")

EPOCHS = 4


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_of(folder: Path) -> int | None:
    """The Ray worker whose run trains in `folder`: the parent of the process that has it as an argument."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(folder / "job.json") in words:
                    return parent_of(int(entry.name))
            except OSError:
                continue
    return None


def kill_a_worker(work: Path, killed: list[Path]) -> None:
    """SIGKILL the worker of the first run that has finished an epoch and not its last."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        for path in work.glob("*/metrics.jsonl"):
            worker = worker_of(path.parent)
            if worker is not None and 1 <= len(read_metrics(RunFolder(path.parent))) < EPOCHS - 1:
                killed.append(path.parent)
                os.kill(worker, signal.SIGKILL)
                return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker through /proc")
def test_a_table_through_ray_with_a_worker_killed(tmp_path, capsys):
    results, work = tmp_path / "results", tmp_path / "work"
    killed: list[Path] = []
    killer = threading.Thread(target=kill_a_worker, args=(work.resolve(), killed))
    killer.start()
    request = Reproduce(
        table=("demo",), set=(f"epochs={EPOCHS}",), engine="ray", jobs=2, device="cpu", results=results, work=work
    )
    status = reproduce(request)
    killer.join()
    assert status == 0, capsys.readouterr().out
    assert killed
    ledger = Ledger(results)
    assert len(ledger.entries()) == 3
    assert ledger.failed() == {}
    sessions = tomllib.loads((killed[0] / "config.toml").read_text())["session"]
    assert len(sessions) == 2  # the task was run again, and went on from the checkpoint
    assert sessions[1]["epoch"] >= 1
    assert not ray.is_initialized()
