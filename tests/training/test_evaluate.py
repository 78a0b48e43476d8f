from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor, nn
from torch.nn import functional

from recnets.cli.main import main
from recnets.data import DataSet, Normalise, Split, data_of
from recnets.errors import RecNetsError
from recnets.models import read_metadata
from recnets.training import Evaluator, Recipe, RunOptions, evaluate, load_recipe, train
from recnets.training.distributed import Processes
from recnets.training.precision import computing


class Fixed(nn.Module):
    """Logits from the first pixels of the image, so that every number can be worked out by hand."""

    num_classes = 7

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :7] * self.scale


@pytest.fixture
def noise() -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (53, 3, 4, 4), generator=generator, dtype=torch.uint8)
    return Split(images, torch.randint(0, 6, (53,), generator=generator))  # class 6 has no image


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)


@pytest.mark.parametrize("batch_size", [1, 8, 53, 1000])
def test_against_a_loop_over_images(noise: Split, batch_size: int) -> None:
    model = Fixed()
    found = evaluate(model, noise, mean=MEAN, std=STD, batch_size=batch_size)
    logits = model(Normalise(MEAN, STD)(noise.images)).detach()
    right = within5 = 0
    for row, label in zip(logits.tolist(), noise.labels.tolist(), strict=True):
        order = sorted(range(7), key=lambda k: -row[k])
        right += order[0] == label
        within5 += label in order[:5]
    assert found.accuracy == 100 * right / 53
    assert found.top5 == 100 * within5 / 53
    assert found.loss == pytest.approx(float(functional.cross_entropy(logits, noise.labels)), rel=1e-6)
    assert torch.equal(found.predictions, logits.argmax(1))
    torch.testing.assert_close(found.confidence, logits.softmax(1).max(1).values)
    for true in range(7):
        for guess in range(7):
            expected = int(((noise.labels == true) & (found.predictions == guess)).sum())
            assert int(found.confusion[true, guess]) == expected
    assert math.isnan(found.per_class[6])
    assert model.training


def test_processes_share_the_images(noise: Split) -> None:
    """Each rank fills in its own part; the parts together are the whole."""
    whole = evaluate(Fixed(), noise, mean=MEAN, std=STD)
    seen = torch.zeros(53, dtype=torch.int64)
    for rank in range(3):
        shard = Evaluator(
            noise, 7, mean=MEAN, std=STD, device=torch.device("cpu"), batch_size=10,
            processes=_Silent(rank, 3),
        )  # fmt: skip
        part = shard(Fixed())
        mine = shard._places
        seen[mine] += 1
        assert torch.equal(part.predictions[mine], whole.predictions[mine])
    assert seen.tolist() == [1] * 53


class _Silent(Processes):
    def total(self, tensor: Tensor) -> Tensor:
        return tensor


def test_most_confused_is_sorted(noise: Split) -> None:
    found = evaluate(Fixed(), noise, mean=MEAN, std=STD)
    pairs = found.most_confused(5)
    counts = [count for _, _, count in pairs]
    assert counts == sorted(counts, reverse=True)
    assert all(true != guess and int(found.confusion[true, guess]) == count for true, guess, count in pairs)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("digits") / "run"
    recipe = load_recipe("quick", model="RecNet(1, 2, 2, 1, 1)", epochs=1)
    return train(recipe, out=folder, options=RunOptions(device="cpu", report=False)).folder


def test_eval_prints_what_the_run_claims(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claimed = json.loads((digits_run / "summary.json").read_text())["final_accuracy"]
    assert main(["eval", str(digits_run), "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["accuracy"] == claimed
    assert (shown["data"], shown["images"], len(shown["per_class"])) == ("digits", 360, 10)
    assert main(["eval", str(digits_run / "last.safetensors"), "--device", "cpu", "--data", "digits"]) == 0
    text = capsys.readouterr().out
    assert f"top-1 {claimed:.2f} %" in text
    assert "mostly taken for" in text


def test_eval_of_weights_with_missing_or_extra_tensors(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = digits_run / "last.safetensors"
    tensors = load_file(source)
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    missing = dict(tensors)
    del missing["stem.conv.weight"]
    save_file(missing, tmp_path / "missing.safetensors", metadata)
    save_file({**tensors, "surplus": torch.zeros(1)}, tmp_path / "extra.safetensors", metadata)
    for name, word in (("missing", "stem.conv.weight"), ("extra", "surplus")):
        assert main(["eval", str(tmp_path / f"{name}.safetensors"), "--device", "cpu"]) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert message.startswith("error:")
        assert word in message


def test_eval_on_other_classes_is_refused(
    tmp_path: Path,
    stripes_data: DataSet,
    make_recipe: Callable[..., Recipe],
    options: RunOptions,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = dataclasses.replace(options, epochs_until=1)
    folder = train(make_recipe(), out=tmp_path / "run", data=stripes_data, options=short).folder
    assert main(["eval", str(folder), "--data", "digits", "--device", "cpu"]) == 1
    assert "were trained on 4 classes of stripes, digits has 10" in " ".join(capsys.readouterr().err.split())


def test_eval_takes_the_share_of_bad_pictures_that_training_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of which a tenth cannot be read: as in training, by --max-bad, and refused with the list of them."""
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(9):
            image.new("RGB", (8, 8), colour).save(tmp_path / "pictures" / name / f"{i}.png")
        (tmp_path / "pictures" / name / "bad.png").write_bytes(b"no picture")
    data, folder = f"folder:{tmp_path / 'pictures'}", tmp_path / "run"
    words = ["--image-size", "8", "--epochs", "1", "--model", "RecNet(1, 2, 2, 1, 1)", "--device", "cpu"]
    recipe = ["train", "--recipe", "quick", "--data", data, *words]
    assert main([*recipe, "--out", str(folder)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "max_bad" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        str(tmp_path / "pictures" / name / "bad.png") for name in "ab"
    ]
    assert main([*recipe, "--out", str(folder), "--max-bad", "0.5"]) == 0
    assert main(["eval", str(folder), "--device", "cpu", "--no-per-class"]) == 0
    assert "mostly taken for" not in capsys.readouterr().out
    assert main(["eval", str(folder), "--device", "cpu", "--max-bad", "0.05"]) == 1
    assert "max_bad = 5.00%" in capsys.readouterr().err
    metadata = {key: value for key, value in read_metadata(folder).items() if key != "max_bad"}  # of older weights
    with pytest.raises(RecNetsError, match="max_bad"):
        data_of(metadata)
    assert len(data_of(metadata, max_bad=0.5).skipped) == 2


def test_train_and_resume_from_the_command_line(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(digits_run), "--lr", "0.3"]) == 1
    assert "cannot resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(digits_run), "--recipe", "paper"]) == 1
    assert "cannot resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(digits_run), "--recipe", "papr"]) == 2
    assert "did you mean 'paper'" in capsys.readouterr().err
    assert main(["train", "--resume", str(digits_run), "--out", str(tmp_path)]) == 2
    assert main(["train", "--resume", str(tmp_path / "none")]) == 1
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(digits_run), "--device", "cpu"]) == 0
    assert "test accuracy" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file" / "run"), "--device", "cpu"]) == 1
    assert "cannot write to the run folder" in " ".join(capsys.readouterr().err.split())


def test_precisions_hold_inside_and_leave_no_trace() -> None:
    def allowed() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before, cuda = allowed(), torch.device("cuda")
    with computing("tf32", cuda):
        assert allowed() == (True, True)
        with computing("fp32", cuda):
            assert allowed() == (False, False)
        assert allowed() == (True, True)
    assert allowed() == before


def test_whoever_watches_is_told_of_every_batch(noise: Split) -> None:
    seen: list[int] = []
    evaluator = Evaluator(noise, 7, mean=[0.5] * 3, std=[0.25] * 3, device=torch.device("cpu"), batch_size=20)
    evaluator(Fixed(), seen.append)
    assert seen == [20, 20, 13]
