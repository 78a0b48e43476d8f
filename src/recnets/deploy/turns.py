"""Timing in turns, each way to run a model in a process of its own.

In one process they would run with each other's threads, caches and memory: malloc, for one, keeps memory that it
would have given back to the system if no other way had ever freed a large block.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recnets.errors import RecNetsError
from recnets.utils import terminable

# The first runs of a turn are not timed: threads of the way before still spin for a while.
SETTLE, TIMED, PAUSE = 4, 8, 0.02
# A turn is quiet if other processes took at most this share of a core. The system's clock counts in hundredths of a
# second, so a turn takes some tens of them.
QUIET, SECONDS = 0.15, 0.2

Run = Callable[[Tensor], Tensor]
Build = Callable[[], Run]
Turn = tuple[float, list[float]]
"""(the share of a core that other processes took meanwhile, the seconds of the timed runs)"""


def _busy_seconds() -> float | None:
    """CPU time that all processes of this machine have used, where the system tells."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
        return (sum(map(int, first[1:4])) + sum(map(int, first[6:9]))) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _turn(run: Run, x: Tensor) -> Turn:
    time.sleep(PAUSE)
    for _ in range(SETTLE):
        run(x)
    taken: list[float] = []
    began, own, all_ = time.perf_counter(), time.process_time(), _busy_seconds()
    while len(taken) < TIMED or time.perf_counter() < began + SECONDS:
        start = time.perf_counter()
        run(x)
        taken.append(time.perf_counter() - start)
    wall, own, after = time.perf_counter() - began, time.process_time() - own, _busy_seconds()
    others = 0.0 if all_ is None or after is None else max(0.0, after - all_ - own) / wall
    return others, taken


def _serve(pipe: Connection, build: Build, shape: tuple[int, ...], threads: int) -> None:
    """A way's own process: answers each True with a turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the process that waits
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            run, x = build(), torch.randn(shape)
            run(x)  # chooses kernels, compiles
            pipe.send(None)
            while pipe.recv():
                pipe.send(_turn(run, x))
    except (EOFError, BrokenPipeError):  # no more turns
        pass
    except Exception as error:
        pipe.send(RecNetsError(f"{type(error).__name__}: {error}"))


def _receive(pipe: Connection, way: str) -> Turn | None:
    try:
        answer = pipe.recv()
    except EOFError:
        answer = RecNetsError("its process ended")
    if isinstance(answer, Exception):
        raise RecNetsError(f"{way!r} cannot be timed: {answer}")
    return answer


@contextlib.contextmanager
def _processes(builds: Mapping[str, Build], shape: tuple[int, ...], threads: int) -> Iterator[dict[str, Connection]]:
    """A process for each way, started one after the other: some ways time their parts when they are built."""
    # Not forked from this process, whose threads and memory they would have.
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once for all
    pipes: dict[str, Connection] = {}
    children = []
    try:
        for way, build in builds.items():
            pipes[way], end = context.Pipe()
            child = context.Process(target=_serve, args=(end, build, shape, threads))
            child.start()
            children.append(child)
            end.close()
            _receive(pipes[way], way)
        yield pipes
    except BaseException:
        for child in children:
            child.terminate()
        raise
    finally:
        for pipe in pipes.values():
            pipe.close()  # a child that waits for its next turn ends
        for child in children:
            child.join(timeout=10)
            if child.is_alive():
                child.terminate()


def time_in_turns(
    builds: Mapping[str, Build], shape: tuple[int, ...], *, threads: int, repeats: int, patience: float
) -> dict[str, Turn]:
    """Of each way, the share of a core that others took in its quietest turns, and the seconds of its runs in them.

    `builds` make the ways, each in its process (so they are pickled). Turns go on until every way had `repeats` runs
    in quiet ones, or for `patience` seconds.
    """
    turns: dict[str, list[Turn]] = {way: [] for way in builds}
    need = -(-repeats // TIMED)

    def quiet(way: str) -> int:
        return sum(others <= QUIET for others, _ in turns[way])

    with terminable(), _processes(builds, shape, threads) as pipes:
        end = time.perf_counter() + patience
        while min(map(len, turns.values())) < need or (min(map(quiet, turns)) < need and time.perf_counter() < end):
            for way, pipe in pipes.items():
                pipe.send(True)
                turn = _receive(pipe, way)
                assert turn is not None
                turns[way].append(turn)
    best = {way: sorted(t, key=lambda turn: turn[0])[: max(need, quiet(way))] for way, t in turns.items()}
    return {way: (t[-1][0], [s for _, taken in t for s in taken]) for way, t in best.items()}
