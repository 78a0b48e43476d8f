"""A benchmark in a process of its own, which is started again where a kernel faults or hangs.

After a fault a process can use its device no more, and a kernel that waits for ever cannot be stopped from within. So
what is measured goes to a journal, a JSON line at a time: what a process was at when it ended is left out by the next
one, and what it had measured is not measured again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAULT = 70  # exit status of a process whose device is of no use any more
VARIABLE = "RECNETS_JOURNAL"  # the file, in the environment of the process that measures


class Journal:
    """What was measured, by name, and what was begun and never ended. Without a file it forgets all."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.ended: dict[str, Any] = {}
        self.lost: list[str] = []
        for line in path.read_text().splitlines() if path is not None and path.exists() else []:
            entry = json.loads(line)
            if "result" in entry:
                self.ended[entry["name"]] = entry["result"]
                self.lost = [name for name in self.lost if name != entry["name"]]  # not all that ends was begun
            else:
                self.lost.append(entry["name"])

    def begin(self, name: str) -> None:
        self._write({"name": name})

    def end(self, name: str, result: Any) -> None:
        self.ended[name] = result
        self._write({"name": name, "result": result})

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(entry) + "\n")


def journal() -> Journal | None:
    """This process's, if it is the one that measures; else it should `supervise` that one."""
    return Journal(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None


def give_up() -> None:
    """End this process at once, for the next one to go on; nothing is cleaned up, which would wait for the device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAULT)


def supervise(script: str, patience: float) -> int:
    """The exit status of this script with these arguments, started again while it faults or hangs at something new.

    A process hangs if its journal does not grow for `patience` seconds.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the process must not outlive this one
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        environment = {**os.environ, VARIABLE: str(path)}
        while True:
            lost = Journal(path).lost
            process = subprocess.Popen([sys.executable, script, *sys.argv[1:]], env=environment)
            try:
                status = _wait(process, path, patience)
            finally:  # Ctrl-C too
                process.kill()
                process.wait()
            new = [name for name in Journal(path).lost if name not in lost]
            how = f"hung for {patience:.0f} s" if status is None else f"was ended by signal {-status}"
            if status == FAULT:
                print("the device is of no use after a fault: a new process goes on", file=sys.stderr, flush=True)
            elif status is not None and status >= 0:
                return status
            elif new:
                print(f"{new[-1]}: the process {how}; a new one goes on without it", file=sys.stderr, flush=True)
            else:
                print(f"the process {how} where nothing new was begun: that is the end", file=sys.stderr, flush=True)
                return 1


def _wait(process: subprocess.Popen[bytes], journal: Path, patience: float) -> int | None:
    """The exit status, or None where the process hangs."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = journal.stat().st_size if journal.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            return None
        time.sleep(0.2)
    return process.returncode
