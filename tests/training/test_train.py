from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from recnets.data import DataSet
from recnets.errors import RecNetsError
from recnets.models import load_weights, read_metadata
from recnets.training import Recipe, RunFolder, RunOptions, TrainResult, evaluate, train
from recnets.training.checkpoint import load_checkpoint
from recnets.training.loop import HANG_UP, STOPPING
from recnets.training.step import TrainStep
from recnets.utils import versions

Make = Callable[..., Recipe]
Weights = Callable[[Path], dict[str, Tensor]]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learned(row: dict[str, float]) -> dict[str, float]:
    """A line without what a clock measured."""
    return {k: v for k, v in row.items() if k not in ("seconds", "images_per_second", "input_share", "fetch_share")}


@pytest.fixture
def after_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something in the middle of training, right after the n-th step."""

    def install(count: int, action: Callable[[], None]) -> None:
        original, seen = TrainStep.__call__, [0]

        def call(self: TrainStep, *args: object) -> None:
            original(self, *args)  # type: ignore[arg-type]
            seen[0] += 1
            if seen[0] == count:
                action()

        monkeypatch.setattr(TrainStep, "__call__", call)

    return install


def test_a_run_explains_itself(tmp_path: Path, stripes_data: DataSet, make_recipe: Make) -> None:
    folder = tmp_path / "run"
    result = train(make_recipe(epochs=8), out=folder, data=stripes_data, options=RunOptions(device="cpu"))
    assert result.outcome == "finished"
    assert {p.name for p in folder.iterdir()} == {
        ".lock", "config.toml", "metrics.jsonl", "checkpoint.pt", "last.safetensors", "summary.json", "report.html"
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary
    assert summary["final_accuracy"] == rows(folder)[-1]["test_accuracy"] > 60
    assert summary["parameters"] == sum(p.numel() for p in load_weights(folder)[0].parameters())
    assert (summary["model"], summary["data"], summary["epochs"]) == ("RecNet(2, 2, 2, 2, 2)", "stripes", 8)
    assert summary["seconds"] > 0
    assert summary["images_per_second"] > 0
    assert 0 < summary["fetch_share"] < summary["input_share"] < 1
    assert [row["epoch"] for row in rows(folder)] == list(range(1, 9))
    config = RunFolder(folder).read_config()
    assert config["session"][0]["versions"] == versions()
    assert config["session"][0]["command"]


def test_weights_carry_their_origin(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    result = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options, command="recnet train")
    metadata = read_metadata(result.folder)
    assert metadata["classes"] == stripes_data.classes
    assert metadata["recipe"] == make_recipe().to_dict()
    assert metadata["normalisation"] == {"mean": list(stripes_data.mean), "std": list(stripes_data.std)}
    assert (metadata["epoch"], metadata["seed"], metadata["command"]) == (3, 0, "recnet train")
    model, _ = load_weights(result.folder)
    again = evaluate(model, stripes_data.test, mean=stripes_data.mean, std=stripes_data.std)
    assert again.accuracy == metadata["accuracy"] == result.history[-1]["test_accuracy"]


MODERN = {
    "label_smoothing": 0.1, "ema": 0.9, "mixup": 0.3, "cutmix": 1.0, "warmup_epochs": 1.0, "decay": "weights",
    "precision": "bf16", "channels_last": True, "restarts": (1,), "lr_granularity": "epoch",
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, MODERN, {"precision": "fp16"}], ids=["plain", "modern", "fp16"])
def test_stopped_anywhere_it_ends_the_same(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    weights_of: Weights,
    changes: dict[str, object],
) -> None:
    """Killed after a checkpoint inside an epoch, at an epoch's end, and after it was over: bit for bit the same."""
    recipe = make_recipe(**changes)
    whole = train(recipe, out=tmp_path / "whole", data=stripes_data, options=options)
    often = dataclasses.replace(options, checkpoint_steps=3)
    folder = tmp_path / "parts"

    with pytest.MonkeyPatch.context() as patch:
        original, seen = TrainStep.__call__, [0]

        def call(self: TrainStep, *args: object) -> None:
            original(self, *args)  # type: ignore[arg-type]
            seen[0] += 1
            if seen[0] in (4, 7):  # one step after the checkpoint; then in the second epoch
                raise RuntimeError("crash")

        patch.setattr(TrainStep, "__call__", call)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crash"):
                train(recipe, out=folder, resume=True, data=stripes_data, options=often)
    result = train(recipe, out=folder, resume=True, data=stripes_data, options=often)
    assert same(weights_of(folder), weights_of(whole.folder))
    assert [learned(r) for r in rows(folder)] == [learned(r) for r in rows(whole.folder)]
    again = train(recipe, out=folder, resume=True, data=stripes_data, options=options)
    assert again.summary is not None
    assert again.summary["final_accuracy"] == (result.summary or {})["final_accuracy"]
    assert len(RunFolder(folder).read_config()["session"]) == 4


def test_epochs_until_stops_in_the_full_schedule(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, weights_of: Weights
) -> None:
    whole = train(make_recipe(), out=tmp_path / "whole", data=stripes_data, options=options)
    first = dataclasses.replace(options, epochs_until=2)
    part = train(make_recipe(), out=tmp_path / "part", data=stripes_data, options=first)
    assert part.outcome == "epochs"
    assert part.summary is not None
    assert (part.summary["epochs"], part.summary["finished"]) == (2, False)
    assert [r["lr"] for r in rows(part.folder)] == [r["lr"] for r in rows(whole.folder)][:2]
    train(make_recipe(), out=part.folder, resume=True, data=stripes_data, options=options)
    assert same(weights_of(part.folder), weights_of(whole.folder))


def test_time_limit_stops_with_a_checkpoint(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, weights_of: Weights
) -> None:
    screen = StringIO()
    whole = train(make_recipe(), out=tmp_path / "whole", data=stripes_data, options=options)
    limited = dataclasses.replace(options, max_seconds=1e-6)
    count = 0
    while True:
        result = train(
            make_recipe(), out=tmp_path / "run", resume=True, data=stripes_data, options=limited,
            console=Console(file=screen, width=200),
        )  # fmt: skip
        count += 1
        if result.outcome == "finished":
            break
        assert result.outcome == "time"
        assert result.summary is None
    assert count == 15  # one step a session
    assert same(weights_of(tmp_path / "run"), weights_of(whole.folder))
    assert f"time is up at epoch 1, step 1 of 5; go on with: recnet train --resume {tmp_path / 'run'}" in (
        screen.getvalue()
    )


@pytest.mark.parametrize("number", STOPPING)
def test_interrupt_writes_a_checkpoint(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    after_steps: Callable[[int, Callable[[], None]], None],
    number: int,
) -> None:
    handler = signal.getsignal(number)
    if handler == signal.SIG_IGN and number == HANG_UP:
        pytest.skip("under nohup")

    def deliver() -> None:
        """What the signal would call; a real one, which could end the test runner, goes to a process of its own."""
        ours = signal.getsignal(number)
        assert ours is not handler
        assert callable(ours)
        ours(number, None)

    after_steps(8, deliver)
    result = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=options)
    assert result.outcome == "interrupted"
    position = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["position"]
    assert (position["epoch"], position["step"]) == (1, 3)
    assert signal.getsignal(number) is handler


def test_metrics_beyond_the_checkpoint_are_trained_again(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    first = dataclasses.replace(options, epochs_until=1)
    folder = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=first).folder
    RunFolder(folder).add_metrics({"epoch": 2, "train_loss": -1})  # written just before a kill
    train(make_recipe(), out=folder, resume=True, data=stripes_data, options=options)
    assert [r["epoch"] for r in rows(folder)] == [1, 2, 3]
    assert min(r["train_loss"] for r in rows(folder)) > 0


def test_best_is_chosen_by_the_validation_split_only(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    data = dataclasses.replace(stripes_data, val=stripes_data.test)
    result = train(make_recipe(epochs=5, val=30), out=tmp_path / "run", data=data, options=options)
    accuracies = [r["val_accuracy"] for r in rows(result.folder)]
    best = accuracies.index(max(accuracies)) + 1
    assert read_metadata(result.folder / "best.safetensors")["epoch"] == best
    assert result.summary is not None
    assert (result.summary["best_epoch"], result.summary["best_val_accuracy"]) == (best, max(accuracies))
    plain = train(make_recipe(), out=tmp_path / "plain", data=stripes_data, options=options)
    assert not (plain.folder / "best.safetensors").exists()


def test_average_is_what_is_saved(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, weights_of: Weights
) -> None:
    folder = train(make_recipe(ema=0.9), out=tmp_path / "run", data=stripes_data, options=options).folder
    content = load_checkpoint(folder / "checkpoint.pt")
    saved, current = weights_of(folder)["stem.conv.weight"], content["model"]["stem.conv.weight"]
    assert not torch.equal(saved, current)
    assert any(torch.equal(saved, tensor) for tensor in content["average"])


def teach(tmp_path: Path, data: DataSet, recipe: Recipe, options: RunOptions) -> TrainResult:
    return train(recipe, out=tmp_path / "teacher", data=data, options=options)


def test_distillation_learns_from_a_run(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, weights_of: Weights
) -> None:
    teacher = teach(tmp_path, stripes_data, make_recipe(epochs=6), options)
    taught = make_recipe(teacher=str(teacher.folder), distill_weight=1.0)
    student = train(taught, out=tmp_path / "student", data=stripes_data, options=options)
    alone = train(make_recipe(), out=tmp_path / "alone", data=stripes_data, options=options)
    assert not same(weights_of(student.folder), weights_of(alone.folder))
    assert student.history[-1]["train_loss"] < student.history[0]["train_loss"]


def test_teachers_of_other_classes_or_input_are_refused(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions
) -> None:
    teacher = teach(tmp_path, stripes_data, make_recipe(epochs=1), options)
    taught = make_recipe(teacher=str(teacher.folder))
    renamed = dataclasses.replace(stripes_data, classes=["a", "b", "c", "d"])
    with pytest.raises(RecNetsError, match=r"teacher .* classes of stripes"):
        train(taught, out=tmp_path / "a", data=renamed, options=options)
    shifted = dataclasses.replace(stripes_data, mean=(0.1, 0.2, 0.3))
    with pytest.raises(RecNetsError, match=r"teacher .* trained with mean"):
        train(taught, out=tmp_path / "b", data=shifted, options=options)
    assert not (tmp_path / "a").exists()


def test_compiled_runs_save_the_plain_model(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    weights_of: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = torch.compile
    calls = []

    def eager(module: torch.nn.Module, **settings: object) -> object:  # without a C++ compiler's minute
        calls.append(settings)
        return compiler(module, backend="eager", dynamic=False)

    monkeypatch.setattr(torch, "compile", eager)
    compiled = dataclasses.replace(options, compile=True)
    run = train(make_recipe(epochs=1), out=tmp_path / "compiled", data=stripes_data, options=compiled)
    plain = train(make_recipe(epochs=1), out=tmp_path / "plain", data=stripes_data, options=options)
    assert calls
    weights, expected = weights_of(run.folder), weights_of(plain.folder)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_refusals(tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions) -> None:
    folder = train(make_recipe(epochs=1), out=tmp_path / "run", data=stripes_data, options=options).folder
    with pytest.raises(RecNetsError, match="already holds a run: resume it with --resume"):
        train(make_recipe(epochs=1), out=folder, data=stripes_data, options=options)

    def refused(recipe: Recipe, words: str, **changes: object) -> None:
        with pytest.raises(RecNetsError, match=words):
            train(
                recipe,
                out=tmp_path / "new",
                data=None if recipe.data == "moon" else stripes_data,
                options=dataclasses.replace(options, **changes),  # type: ignore[arg-type]
            )
        assert not (tmp_path / "new").exists()

    refused(make_recipe(model="recnet_60_48"), "did you mean 'recnet_60_480'")
    refused(make_recipe(model_options={"colour": 3}), "cannot be built with")
    refused(make_recipe(data="moon"), "moon")
    refused(make_recipe(), "device must be", device="toaster")
    refused(make_recipe(), "needs one process on a CUDA device", graph="on")


def test_tensorboard_is_an_extra(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Make,
    options: RunOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged = dataclasses.replace(options, tensorboard=True)
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "tensorboard", None)
        with pytest.raises(RecNetsError, match=r"recnets\[tensorboard\]"):
            train(make_recipe(), out=tmp_path / "without", data=stripes_data, options=logged)
        assert not (tmp_path / "without").exists()
    pytest.importorskip("tensorboard")
    folder = train(make_recipe(), out=tmp_path / "with", data=stripes_data, options=logged).folder
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    expected = [row["test_accuracy"] for row in rows(folder)]
    assert [e.value for e in events.Scalars("test_accuracy")] == pytest.approx(expected)


def test_threads_are_given_back(
    tmp_path: Path, stripes_data: DataSet, make_recipe: Make, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny batches take one thread, unless asked otherwise; afterwards all is as before."""
    used = []
    monkeypatch.setattr("recnets.training.run.device_name", lambda device: used.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        for threads in (None, 2):
            chosen = dataclasses.replace(options, threads=threads, epochs_until=1)
            train(make_recipe(), out=tmp_path / str(threads), data=stripes_data, options=chosen)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert set(used[: len(used) // 2]) == {1}
    assert set(used[len(used) // 2 :]) == {2}
