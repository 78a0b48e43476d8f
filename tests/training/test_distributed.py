"""Two processes on the CPU against one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recnets.errors import RecNetsError
from recnets.training import RunOptions, load_recipe, train
from recnets.training.distributed import Processes, choose_device

# 1,437 images in batches of 100: the last has 37, which two processes share as 19 and 18.
CHANGES = {
    "model": "RecNet(2, 2, 2, 2, 2)",
    "epochs": 3,
    "batch_size": 100,
    "lr": 0.02,
}  # gentle: rounding grows with the rate


def run_two(*args: str) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "recnets", "train", "--device", "cpu", "--threads", "1", *args,
    ]  # fmt: skip
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output = child.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):  # the workers too, should they hang
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = load_recipe("quick", **CHANGES, sync_batchnorm=True)
    one = train(recipe, out=tmp_path / "one", options=RunOptions(device="cpu", threads=1, report=False))
    folder = tmp_path / "two"
    alone = RunOptions(device="cpu", threads=1, report=False, epochs_until=1)
    train(recipe, out=folder, options=alone)  # a checkpoint does not depend on the number of processes
    output = run_two("--resume", str(folder))
    assert output.count("epoch 2/3") == 1  # one process speaks

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for ours, theirs in zip(rows, one.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=2e-3)
        assert ours["train_accuracy"] == pytest.approx(theirs["train_accuracy"], abs=0.3)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=2e-2)
    first, second = load_file(one.folder / "last.safetensors"), load_file(folder / "last.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        error = (tensor.double() - second[name].double()).norm() / tensor.double().norm().clamp(min=1e-6)
        assert error < 2e-2, name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["processes"], summary["epochs"]) == (2, 3)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_layers_of_one_step_whose_w_h_is_idle(tmp_path: Path) -> None:
    run_two("--model", "RecNet(1, 2, 2, 1, 2)", "--epochs", "1", "--batch-size", "300", "--out", str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["processes"] == 2


def test_a_last_batch_smaller_than_the_processes_is_refused(
    stripes_data: object, make_recipe: object, options: RunOptions
) -> None:
    from recnets.training.session import build_session

    recipe = make_recipe(batch_size=23)  # type: ignore[operator]  # 70 = 3 · 23 + 1
    with pytest.raises(RecNetsError, match="last one of 70 images has 1: fewer than the 2 processes"):
        build_session(recipe, options, stripes_data, torch.device("cpu"), Processes(0, 2))  # type: ignore[arg-type]


def test_one_process_needs_no_group() -> None:
    alone = Processes()
    assert alone.main
    assert alone.largest([3, -1], torch.device("cpu")) == [3, -1]
    assert alone.from_main("x") == "x"
    assert float(alone.total(torch.tensor(2.0))) == 2.0
    alone.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RecNetsError, match="sees no CUDA device"):
        choose_device("cuda", Processes())
