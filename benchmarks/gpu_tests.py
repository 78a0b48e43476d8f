"""Run the tests that need a GPU, in processes side by side, and keep their log.

    python benchmarks/gpu_tests.py                                       # all of the kernels', and of training
    python benchmarks/gpu_tests.py --jobs 4 tests/ops/test_cuda_kernels.py tests/ops/test_cuda_maps.py

Nearly all of their time is compiling, on one core a process. Needs pytest and no plugin of it. The log,
benchmarks/results/tests-….txt, has what every process printed; the exit status is 1 where a test failed, or none ran.
Ctrl-C or the end of a time limit (SIGTERM) stops all processes, and the log has what they printed until then.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import torch

from common import RESULTS, context, file_name, origin
from recnets.utils import atomic_write

ROOT = Path(__file__).parents[1]
PATHS = [
    "tests/ops",
    "tests/data/test_loader.py",
    "tests/training/test_step.py",
    "tests/training/test_stopwatch.py",
]
SHARD = "RECNETS_SHARD"  # "2/8": of every eight tests the third
COUNTED = ("passed", "failed", "errors", "error", "skipped")


def pytest_collection_modifyitems(config: object, items: list[object]) -> None:
    """For pytest, which loads this file as a plugin: keep this process's share of the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it: `stop` must not
    number, of = map(int, os.environ[SHARD].split("/"))
    items[:] = items[number::of]


def start(paths: Sequence[str], number: int, of: int, log: IO[str]) -> subprocess.Popen[bytes]:
    """A process with its share of the tests."""
    folders = [str(Path(__file__).parent), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, SHARD: f"{number}/{of}", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    options = [
        "-q",
        "-p",
        Path(__file__).stem,
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        "--color=no",
        "--tb=short",
        "--show-capture=stdout",  # what the compiler logs would be most of the file
    ]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def outcomes(text: str) -> Counter[str]:
    """`{"passed": 80, "skipped": 2}` from the last line that pytest prints."""
    lines = [
        line for line in text.splitlines() if re.search(r"\b(passed|failed|errors?|skipped|no tests ran)\b.* in ", line)
    ]
    found = re.findall(rf"(\d+) ({'|'.join(COUNTED)})\b", lines[-1]) if lines else []
    return Counter({word.removesuffix("s") if word == "errors" else word: int(number) for number, word in found})


def stop(processes: Sequence[subprocess.Popen[bytes]], patience: float = 5) -> None:
    """Ask all for the failures so far; one whose kernel does not end is not waited for."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    end = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def run(paths: Sequence[str], jobs: int) -> Iterator[tuple[str, int, Counter[str]]]:
    """(what it printed, exit status, outcomes) of every process, all of them under way at once."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(Path(folder) / f"{number}.txt", "w+") for number in range(jobs)]  # noqa: SIM115 (closed below)
        processes = [start(paths, number, jobs, log) for number, log in enumerate(logs)]
        try:
            for process, log in zip(processes, logs, strict=True):
                try:
                    status = process.wait()
                except KeyboardInterrupt:
                    stop(processes)
                    status = process.wait()
                log.seek(0)
                text = log.read().replace(f"{ROOT}{os.sep}", "")  # folders of this machine mean nothing elsewhere
                yield text, status, outcomes(text)
        finally:
            for process, log in zip(processes, logs, strict=True):
                process.kill()
                process.wait()
                log.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, help="files and folders of tests")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU too, where most of them are skipped")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the log")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, got {args.jobs}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.anywhere:
        print("these tests are for a CUDA device; --anywhere runs them without one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    began, total, bad = time.time(), Counter[str](), 0
    log = [origin(f"{args.jobs} processes, each with one of every {args.jobs} tests")]
    for number, (text, status, found) in enumerate(run(args.paths, args.jobs)):
        total += found
        bad += status not in (0, 5)  # 5: a process without a test
        log += [f"# process {number}, exit status {status}\n", text.strip(), "\n"]
        print(f"process {number}: exit status {status}, {dict(found)}", flush=True)
        if status not in (0, 5):
            print(text[-2000:], flush=True)
    words = ", ".join(f"{total[word]} {word}" for word in ("passed", "failed", "error", "skipped") if total[word])
    closing = f"{words or 'no test ran'} in {time.time() - began:.0f} s"
    path = args.out / (file_name("tests", context(device)) + ".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join([*log, f"# {closing}\n"]))
    print(f"{closing}; {path}")
    return int(bad > 0 or not total["passed"])


if __name__ == "__main__":
    sys.exit(main())
