"""Timing in turns, every way in its own process."""

from __future__ import annotations

import os
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
