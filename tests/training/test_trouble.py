"""What goes wrong leaves nothing wrong behind: results are never written over, nor anything that is not finite."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recnets.cli.main import main
from recnets.data import DataSet
from recnets.errors import Misuse, RecNetsError
from recnets.training import Diverged, Evaluator, Recipe, RunFolder, RunOptions, train
from recnets.training.checkpoint import load_checkpoint
from recnets.training.distributed import Processes
from recnets.training.loop import Interrupts
from recnets.training.session import build_session
from recnets.training.step import TrainStep

Make = Callable[..., Recipe]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("epochs", [1, 3], ids=["stopped", "finished"])
def test_a_resume_without_its_checkpoint_touches_nothing(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, epochs: int
) -> None:
    first = dataclasses.replace(options, epochs_until=epochs)
    folder = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=first).folder
    (folder / "checkpoint.pt").unlink()
    before = contents(folder)
    with pytest.raises(RecNetsError, match=r"checkpoint.pt is missing.*put the file back, or start a new run"):
        train(make_recipe(), out=folder, resume=True, data=stripes_data, options=options)
    assert contents(folder) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    folder.write_config(make_recipe(), {"epoch": 0, "step": 0})
    folder.rewrite_metrics([])
    folder.release()
    assert train(make_recipe(), out=folder.path, resume=True, data=stripes_data, options=options).outcome == "finished"


def test_nothing_is_written_over_in_a_folder_of_others(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    (tmp_path / "report.html").write_text("my own")
    before = contents(tmp_path)
    with pytest.raises(RecNetsError, match=r"report.html is in the way"):
        train(make_recipe(), out=tmp_path, data=stripes_data, options=options)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("value", [float("inf"), 1e20])
def test_broken_weights_are_never_published(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    """Broken in the last step of the second epoch, after its loss: only the first epoch is there."""
    original, seen = TrainStep.__call__, [0]

    def call(self: TrainStep, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        seen[0] += 1
        if seen[0] == 10:
            with torch.no_grad():
                next(self.model.parameters())[0] = value

    monkeypatch.setattr(TrainStep, "__call__", call)
    with pytest.raises(Diverged, match=r"at step 9 \(epoch 2, step 4 of 5\).*\(epoch 2, after 0 steps\)"):
        train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options)
    folder = RunFolder(tmp_path / "run")
    assert [json.loads(line)["epoch"] for line in folder.metrics.read_text().splitlines()] == [1]
    assert load_checkpoint(folder.checkpoint)["position"]["epoch"] == 1
    monkeypatch.undo()
    train(make_recipe(), out=folder.path, resume=True, data=stripes_data, options=options)


def test_a_test_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Evaluator.__call__
    monkeypatch.setattr(
        Evaluator, "__call__", lambda self, model: dataclasses.replace(original(self, model), loss=float("nan"))
    )
    with pytest.raises(Diverged, match=r"test_loss is not a finite number .*after 0 steps"):
        train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_one_step_that_blows_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only loss is that of the initial weights, which is fine."""
    settings = ["--model", "RecNet(1, 2, 2, 1, 1)", "--batch-size", "2000", "--lr", "1e30", "--weight-decay", "0"]
    words = ["train", *settings, "--epochs", "3", "--eval-every", "3", "--device", "cpu", "--out", str(tmp_path)]
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "diverged" in shown
    assert "(epoch 1, after 0 steps)" in shown
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "config.toml", "metrics.jsonl", "checkpoint.pt"}


def test_pictures_too_small_for_the_model_leave_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--image-size", "2", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "needs at least 4×4 pixels, got 2×2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_says_how_to_go_on(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise RecNetsError("cannot write last.safetensors: No space left on device")

    folder = tmp_path / "my run"
    with monkeypatch.context() as patch:
        patch.setattr("recnets.training.loop.save_weights", full)
        with pytest.raises(RecNetsError, match=f"No space left on device; .* go on with: .*--resume '{folder}'"):
            train(make_recipe(), out=folder, data=stripes_data, options=options)
    assert train(make_recipe(), out=folder, resume=True, data=stripes_data, options=options).outcome == "finished"


@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_a_checkpoint_cut_short_is_named(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, share: float
) -> None:
    first = dataclasses.replace(options, epochs_until=1)
    folder = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=first).folder
    path = folder / "checkpoint.pt"
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(RecNetsError, match=r"run/checkpoint.pt is not a readable.*put back a copy.* another --out"):
        train(make_recipe(), out=folder, resume=True, data=stripes_data, options=options)


def test_unknown_names_are_misuse(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    for recipe, device in ((make_recipe(model="recnt"), "cpu"), (make_recipe(), "gpu"), (make_recipe(), "meta")):
        with pytest.raises(Misuse):
            train(recipe, out=tmp_path / "run", data=stripes_data, options=dataclasses.replace(options, device=device))
    with pytest.raises(Misuse, match="unknown data set 'moon'"):
        train(make_recipe(data="moon"), out=tmp_path / "run", options=options)


def test_a_batch_too_small_for_batch_normalisation_is_found_at_the_start(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    hidden = {"head": "hidden"}
    for size in (1, 23):  # 70 = 3 · 23 + 1
        with pytest.raises(Misuse, match=f"batches of {size}, the last one of 70 images has 1: too few .*batch_size"):
            train(
                make_recipe(batch_size=size, model_options=hidden),
                out=tmp_path / "run",
                data=stripes_data,
                options=options,
            )
    assert not (tmp_path / "run").exists()


def test_looking_for_such_a_batch_leaves_no_trace(
    stripes_data: DataSet, make_recipe: Make, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        recipe = make_recipe(batch_size=23, model="googlenet")  # which has dropout
        session = build_session(recipe, options, stripes_data, torch.device("cpu"), Processes())
        return session.model.state_dict(), torch.get_rng_state()

    tensors, state = build()
    monkeypatch.setattr("recnets.training.session._check_smallest_batch", lambda *_: None)
    expected, expected_state = build()
    assert torch.equal(state, expected_state)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP")
def test_a_terminal_that_closes_never_aborts() -> None:
    """It may send SIGHUP more than once; `nohup` has it ignored, and that stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            note = signal.getsignal(signal.SIGHUP)
            assert callable(note)
            note(signal.SIGHUP, None)
            note(signal.SIGHUP, None)
            assert interrupts.received == signal.SIGHUP
            with pytest.raises(KeyboardInterrupt):
                note(signal.SIGINT, None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nan_stops_and_keeps_the_good_checkpoint(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    recipe = make_recipe(lr=1e20)
    often = dataclasses.replace(options, checkpoint_steps=1)
    with pytest.raises(Diverged, match=r"diverged: .* at step \d+ \(epoch 1, step \d of 5\).*--lr .it was 1e\+20") as e:
        train(recipe, out=tmp_path / "run", data=stripes_data, options=often)
    assert "last good checkpoint stays in" in str(e.value)
    content = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    for name, tensor in content["model"].items():
        assert torch.isfinite(tensor.float()).all(), name


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (float("inf"), r"weights or statistics are not finite numbers \(stem.conv.weight: inf\)"),
        (-2e16, r"exceed 1e\+15 \(stem.conv.weight: 2e\+16\)"),
    ],
)
def test_weights_that_broke_after_a_finite_loss_are_never_saved(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    what: str,
) -> None:
    original, seen = TrainStep.__call__, [0]

    def call(self: TrainStep, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        seen[0] += 1
        if seen[0] == 4:
            with torch.no_grad():
                next(self.model.parameters())[0] = value

    monkeypatch.setattr(TrainStep, "__call__", call)
    often = dataclasses.replace(options, checkpoint_steps=2)
    with pytest.raises(Diverged, match=rf"{what} at step 3 .*after 2 steps"):
        train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=often)
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["position"]["step"] == 2


@pytest.mark.parametrize("value", [1e30, float("nan")])
def test_a_statistic_may_be_large_and_must_be_a_number(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    """As of a recursion without BN inside, whose states grow by any factor for some batches."""
    original, seen = TrainStep.__call__, [0]

    def call(self: TrainStep, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        seen[0] += 1
        if seen[0] == 4:
            self.model.get_buffer("stem.norm.running_var").fill_(value)

    monkeypatch.setattr(TrainStep, "__call__", call)
    often = dataclasses.replace(options, checkpoint_steps=2)
    if math.isfinite(value):
        assert train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=often).outcome == "finished"
        return
    with pytest.raises(Diverged, match=r"weights or statistics are not finite numbers \(stem.norm.running_var: nan\)"):
        train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=often)


def test_a_run_whose_every_step_overflows_fp16_says_so(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and the weights stay finite: such steps are left out, and only the scale of the loss tells."""
    backward = torch.Tensor.backward

    def overflowing(self: torch.Tensor) -> None:
        backward(self * math.inf)

    monkeypatch.setattr(torch.Tensor, "backward", overflowing)
    recipe = make_recipe(precision="fp16", epochs=10)
    with pytest.raises(Diverged, match=r"the gradients overflow fp16 at every step at step 16 .*--precision fp32"):
        train(recipe, out=tmp_path / "run", data=stripes_data, options=dataclasses.replace(options, check_steps=1))
