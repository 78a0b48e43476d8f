"""SIGKILL, the real one, at random moments: nothing may be lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recnets.training import RunOptions, load_recipe, train

KILLS = 4
CHANGES = {"model": "RecNet(1, 2, 2, 1, 1)", "epochs": 6, "mixup": 0.2, "ema": 0.9}
SETTINGS = ["--model", "RecNet(1, 2, 2, 1, 1)", "--epochs", "6", "--mixup", "0.2", "--ema", "0.9"]


def start(*args: str) -> subprocess.Popen[str]:
    # Checkpoints all the time, so that many kills meet one being written.
    command = [sys.executable, "-m", "recnets", "train", *args, "--checkpoint-steps", "1", "--threads", "1"]
    return subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def stamp(path: Path) -> float:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_again_and_again_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = RunOptions(device="cpu", threads=1, report=False)
    train(load_recipe("quick", **CHANGES), out=tmp_path / "whole", options=options)

    folder, moments = tmp_path / "run", random.Random(time.time_ns())
    kills = 0
    for attempt in range(KILLS):
        arguments = (
            ["--resume", str(folder)] if (folder / "config.toml").exists() else ["--out", str(folder), *SETTINGS]
        )
        before, delay = stamp(folder / "checkpoint.pt"), moments.uniform(0, 0.5)
        child = start(*arguments)
        while child.poll() is None and stamp(folder / "checkpoint.pt") == before:
            time.sleep(0.002)
        time.sleep(delay)  # from the first sign of life on
        child.send_signal(signal.SIGKILL)
        output = child.communicate()[0]
        kills += child.returncode == -signal.SIGKILL
        assert child.returncode in (0, -signal.SIGKILL), f"attempt {attempt}, {delay:.3f} s: {output}"
    assert kills >= 2, "the run was over too soon for this test to mean anything"

    child = start("--resume", str(folder))
    output = child.communicate()[0]
    assert child.returncode == 0, output
    whole, parts = load_file(tmp_path / "whole" / "last.safetensors"), load_file(folder / "last.safetensors")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_ctrl_c_says_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = start("--out", str(folder), *SETTINGS, "--epochs", "500")
    while child.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    output = child.communicate()[0]
    assert child.returncode == 130, output
    assert f"go on with: recnet train --resume {folder}" in output
    assert "Traceback" not in output
    assert (folder / "checkpoint.pt").exists()
