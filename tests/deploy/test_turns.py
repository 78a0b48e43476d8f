"""Timing in turns, every way in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from recnets.deploy.turns import TIMED, time_in_turns
from recnets.errors import RecNetsError


class Sleeper:
    """Takes a known time, and checks that it has a process to itself."""

    def __init__(self, seconds: float, elsewhere: int) -> None:
        assert os.getpid() != elsewhere
        assert torch.get_num_threads() == 1
        self.event = torch.multiprocessing.Event()
        self.seconds = seconds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (1, 2)
        self.event.wait(self.seconds)
        return x


def test_each_way_is_timed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where the other processes look for `Sleeper`
    builds = {f"{ms} ms": partial(Sleeper, 1e-3 * ms, os.getpid()) for ms in (2, 20)}
    found = time_in_turns(builds, (1, 2), threads=1, repeats=TIMED + 1, patience=0)
    for ms in (2, 20):
        others, taken = found[f"{ms} ms"]
        assert len(taken) >= TIMED + 1
        assert min(taken) >= 0.9e-3 * ms
        assert others >= 0
    assert min(found["20 ms"][1]) > min(found["2 ms"][1])


def test_what_went_wrong_in_another_process_is_told():
    with pytest.raises(RecNetsError, match=r"'broken' cannot be timed: ValueError: invalid literal"):
        time_in_turns({"broken": partial(int, "x")}, (1,), threads=1, repeats=1, patience=0)  # type: ignore[dict-item]
    with pytest.raises(RecNetsError, match="'dead' cannot be timed: its process ended"):
        time_in_turns({"dead": partial(os._exit, 3)}, (1,), threads=1, repeats=1, patience=0)  # type: ignore[dict-item]


BENCH = """
import sys, time
from functools import partial
from pathlib import Path
from recnets.deploy.turns import time_in_turns

class Slow:
    def __init__(self, pids):
        import os
        Path(pids).write_text(str(os.getpid()))
    def __call__(self, x):
        time.sleep(0.5)
        return x

if __name__ == "__main__":
    try:
        time_in_turns({"slow": partial(Slow, sys.argv[1])}, (1,), threads=1, repeats=1000, patience=0)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT to all", "SIGTERM to one"])
def test_nothing_is_left_of_what_is_interrupted(number, tmp_path):
    """A Ctrl-C at a terminal reaches all processes, SIGTERM one of them."""
    (tmp_path / "bench.py").write_text(BENCH)
    pid = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "bench.py"), str(pid)], stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while process.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    time.sleep(1)  # in the midst of a turn
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
