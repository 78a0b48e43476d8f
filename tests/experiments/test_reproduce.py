"""Whole tables run for real on the embedded digits: killed, continued, failing, and through a bare interpreter."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from recnets.cli.main import main
from recnets.experiments.__main__ import main as bare
from recnets.experiments.__main__ import parse
from recnets.experiments.job import Job, result_of
from recnets.experiments.ledger import Ledger, read_metrics
from recnets.experiments.reproduce import Reproduce
from recnets.training import RunFolder

EPOCHS = 4


def command(folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "recnets", "reproduce", "--table", "demo", "--recipe", "quick", "--set",
        f"epochs={EPOCHS}", "--results", str(folder / "results"), "--work", str(folder / "work"), "--device", "cpu",
        "--threads", "1", *more,
    ]  # fmt: skip


def wait_for(what, seconds: float = 120.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def midway(folder: Path) -> list[Path]:
    """Run folders that have finished an epoch and are far from the last."""
    found = [path.parent for path in folder.glob("work/*/metrics.jsonl")]
    return [path for path in found if 1 <= len(read_metrics(RunFolder(path))) < EPOCHS]


@pytest.mark.slow
def test_a_table_survives_ctrl_c_and_sigkill_and_becomes_a_page(tmp_path, capsys):
    """From nothing, interrupted, killed without warning in the middle of a run, continued, then the tables."""
    ledger = Ledger(tmp_path / "results")
    # A shell's background job, as which tests may run, ignores Ctrl-C and hands that down.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    driver = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    first = wait_for(lambda: midway(tmp_path))[0]
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130
    assert "the same command goes on" in out
    folder = RunFolder(first)
    folder.claim()  # nobody holds it any more
    folder.release()
    assert json.loads((first / "outcome.json").read_text()) == {"status": "interrupted"}
    assert (ledger.entries(), ledger.failed()) == ({}, {})

    driver = subprocess.Popen(command(tmp_path, "--jobs", "2"), stdout=subprocess.DEVNULL)
    second = wait_for(lambda: [path for path in midway(tmp_path) if path != first])[0]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert len(ledger.entries()) < 3

    again = subprocess.run(command(tmp_path, "--jobs", "2"), capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    entries = ledger.entries()  # each is checked for all its epochs
    assert len(entries) == 3
    assert ledger.failed() == {}
    assert f"start  {second.name} from epoch" in again.stdout
    for path in (first, second):
        sessions = tomllib.loads((path / "config.toml").read_text())["session"]
        assert len(sessions) >= 2
        assert all(session["epoch"] >= 1 for session in sessions[1:])  # it went on where it was

    # A further call has nothing to do, and the tables show every row.
    flags = ["--recipe", "quick", "--set", f"epochs={EPOCHS}", "--results", str(ledger.folder)]
    assert main(["reproduce", "--table", "demo", *flags, "--work", str(tmp_path / "work")]) == 0
    assert "3 rows, 3 runs: 3 in" in capsys.readouterr().out
    assert main(["tables", *flags, "--no-figures"]) == 0
    text = (ledger.folder / "TABLES.md").read_text()
    for name, entry in entries.items():
        assert f"[{entry['final_accuracy']:.2f}](runs/{name}.json)" in text
    assert "Demonstration" in (ledger.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_row_that_cannot_run_is_shown_and_the_rest_goes_on(tmp_path, capfd):
    """Missing data and a loss that explodes: both recorded with their reason, exit status 1."""
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--device", "cpu"]
    only = ["--only", "recnet_60_480", "--dataset", "cifar100", "--table", "2"]
    assert main(["reproduce", *only, "--data-dir", str(tmp_path), "--no-download", *places]) == 1
    assert "FAILED recnet_60_480-cifar100-s0: cifar100 is not in" in capfd.readouterr().out

    exploding = ["--table", "demo", "--set", "lr=1e30", "epochs=2", "--only", "*kernel_h*", *places]
    assert main(["reproduce", *exploding]) == 1
    failed = Ledger(tmp_path / "results").failed()
    reasons = {name: record["reason"] for name, record in failed.items()}
    assert len(reasons) == 2
    assert all("loss" in r or "finite" in r for name, r in reasons.items() if "digits" in name), reasons

    capfd.readouterr()
    assert main(["reproduce", *only, "--dry-run", *places]) == 0
    assert "failed: cifar100 is not in" in capfd.readouterr().out
    assert main(["tables", "--results", str(tmp_path / "results"), "--no-figures"]) == 0
    text = (tmp_path / "results" / "TABLES.md").read_text()
    assert "- failed: RecNet-60-480 on CIFAR-100: cifar100 is not in" in text
    assert "| 316K | 285,740 | 309,460 | 93.28 | – | – | – | 73.68 | failed | – | – |" in text


def test_a_run_whose_process_dies_says_how(tmp_path):
    job = Job("a-run", {}, "quick", str(tmp_path), "recnet reproduce")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.kill()
    process.wait()
    result = result_of(job, process)
    assert result["status"] == "lost"
    assert "killed by SIGKILL (out of memory?)" in result["reason"]
    job.outcome.write_text("{")  # cut short: as good as none
    assert result_of(job, process)["status"] == "lost"
    job.outcome.write_text('{"status": "epochs"}')
    assert result_of(job, process) == {"status": "epochs"}


def test_the_arguments_without_tyro():
    """`python -m recnets.experiments` understands what `recnet` does."""
    words = "reproduce --table 1a 2 --dataset cifar100 --seeds 3 --jobs 2 --max-seconds 500 --set precision=bf16"
    assert parse([*words.split(), "--dry-run", "--no-download", "--data-dir", "d"]) == Reproduce(
        table=("1a", "2"),
        dataset=("cifar100",),
        seeds=3,
        jobs=2,
        max_seconds=500.0,
        set=("precision=bf16",),
        dry_run=True,
        no_download=True,
        data_dir=Path("d"),
    )
    assert parse(["reproduce"]) == Reproduce()
    with pytest.raises(SystemExit):
        parse(["reproduce", "--engine", "slurm"])
    assert bare(["reproduce", "--recipe", "nope"]) == 2


BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tyro", "rich"):
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
from recnets.experiments.__main__ import main
raise SystemExit(main(["reproduce", "--table", "demo", "--dry-run", "--device", "cpu"]))
"""


@pytest.mark.slow
def test_bare_pytorch_is_enough(tmp_path):
    run = subprocess.run([sys.executable, "-c", BARE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "3 rows, 3 runs, 0 done" in run.stdout


def test_two_at_once_are_refused(tmp_path, capsys):
    import fcntl

    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["reproduce", "--table", "demo", "--results", str(tmp_path), "--work", str(tmp_path)]) == 1
    assert "another recnet reproduce is at work" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [".lock"]


def test_results_that_cannot_be_written_are_found_before_the_first_run(tmp_path, capsys):
    (tmp_path / "results").write_text("a file")
    command = ["reproduce", "--table", "demo", "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert main(command) == 1
    assert "cannot make" in capsys.readouterr().err
    assert os.listdir(tmp_path / "work") == [".lock"]
