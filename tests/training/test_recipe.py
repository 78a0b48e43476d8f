from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from recnets.cli.train import Train, parse, starting_recipe
from recnets.errors import RecNetsError
from recnets.training import Recipe, load_recipe, recipe_from_dict, recipe_names
from recnets.training.recipe import recipe_changes


def values_of(name: str) -> dict[str, object]:
    return tomllib.loads((resources.files("recnets") / "recipes" / f"{name}.toml").read_text())


def test_names() -> None:
    assert {"paper", "quick"} <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_files_hold_only_what_differs_from_the_defaults(name: str) -> None:
    recipe, defaults = load_recipe(name).to_dict(), Recipe().to_dict()
    for key, value in values_of(name).items():
        assert recipe[key] == value
        assert value != defaults[key], f"{name}.toml repeats the default of {key}"


def test_paper_is_the_papers() -> None:
    recipe = load_recipe("paper")
    assert (recipe.lr, recipe.min_lr, recipe.momentum, recipe.nesterov, recipe.dampening) == (0.1, 0, 0.9, True, 0)
    assert (recipe.weight_decay, recipe.decay, recipe.batch_size, recipe.epochs) == (5e-4, "all", 64, 200)
    assert (recipe.restarts, recipe.pad, recipe.flip, recipe.warmup_epochs) == ((20, 60, 120), 4, True, 0)
    modern = (recipe.label_smoothing, recipe.mixup, recipe.cutmix, recipe.ema, recipe.teacher)
    assert modern == (0, 0, 0, 0, None)


def test_quick_never_mirrors_digits() -> None:
    recipe = load_recipe("quick")
    assert recipe.data == "digits"
    assert not recipe.flip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"lr": -1.0}, "lr must be greater than 0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"lr": float("inf")}, "lr must be a finite number, got inf"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"seed": 2**63}, r"seed must be 0 or more and less than 2\*\*63"),
        ({"split_seed": 2**32}, r"split_seed must be 0 or more and less than 2\*\*32"),
        ({"min_lr": 0.2}, "min_lr must be between 0 and lr"),
        ({"restarts": (60, 20)}, "restarts must be rising"),
        ({"restarts": (100,)}, "restarts must be rising"),
        ({"restarts": (100,)}, r"--restarts alone, or restarts=\[\]"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"momentum": 0.0}, "nesterov needs momentum"),
        ({"dampening": 0.5}, "nesterov needs momentum"),
        ({"ema": 1.0}, "ema must be in"),
        ({"precision": "fp8"}, "precision must be one of fp32, tf32, bf16, fp16"),
        ({"warmup_epochs": 101}, "warmup_epochs must be between"),
        ({"distill_temperature": 0.0}, "distill_temperature"),
        ({"image_size": 0}, "image_size"),
    ],
)
def test_bad_values(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe(**changes)


@pytest.mark.parametrize(
    "changes", [{"lr": "0.1"}, {"epochs": 2.5}, {"flip": 1}, {"epochs": True}, {"restarts": (1.5,)}, {"teacher": 3}]
)
def test_bad_types(changes: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(changes))):
        Recipe(**changes)


def test_unknown_setting_suggests(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("label_smothing = 0.1\n")
    with pytest.raises(RecNetsError, match="unknown setting 'label_smothing'; did you mean 'label_smoothing'"):
        load_recipe(file)
    file.write_text("lr = = 1")
    with pytest.raises(RecNetsError, match="not valid TOML"):
        load_recipe(file)
    with pytest.raises(RecNetsError, match=r"no recipe 'papr'.*'paper'"):
        load_recipe("papr")


def test_dict_round_trip() -> None:
    recipe = load_recipe("paper", model_options={"head": "hidden", "d": [1, 2]}, image_size=20)
    assert recipe_from_dict(recipe.to_dict()) == recipe


def test_changes_are_named() -> None:
    old = load_recipe("paper")
    assert recipe_changes(old, old) == []
    assert recipe_changes(old, dataclasses.replace(old, lr=0.2, data="cifar10")) == [
        "data: 'cifar100' -> 'cifar10'",
        "lr: 0.1 -> 0.2",
    ]


def parsed(*args: str) -> Train:
    return parse(args, "recnet train").__self__  # type: ignore[attr-defined, no-any-return]


def test_command_line_starts_from_the_recipe_that_fits() -> None:
    assert starting_recipe([]) == load_recipe("quick")
    assert starting_recipe(["--data", "digits"]) == load_recipe("quick")
    assert starting_recipe(["--data=cifar100"]) == load_recipe("paper")
    assert starting_recipe(["--data", "digits", "--recipe", "paper"]) == load_recipe("paper")


def test_every_field_can_be_given() -> None:
    """One argument for every field of the recipe, and each arrives."""
    given = {
        "model": "recnet_60_480", "data": "cifar10", "model_options": {"e": 8, "head": "hidden", "d": [5, 5, 5]},
        "image_size": 24, "val": 10, "split_seed": 3, "seed": 4, "init": "torch", "epochs": 30, "batch_size": 32,
        "weights": "recnet_60_480.cifar100", "lr": 0.2, "min_lr": 0.01, "restarts": (5, 10), "lr_granularity": "epoch",
        "warmup_epochs": 2.0,
        "momentum": 0.8, "nesterov": False, "dampening": 0.1, "weight_decay": 0.001, "decay": "weights", "pad": 2,
        "flip": False, "label_smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0, "ema": 0.99, "teacher": "t",
        "distill_weight": 0.3, "distill_temperature": 2.0, "precision": "bf16", "channels_last": True,
        "sync_batchnorm": True,
    }  # fmt: skip
    assert set(given) == {f.name for f in dataclasses.fields(Recipe)}
    assert not [k for k, v in given.items() if getattr(load_recipe("paper"), k) == v]
    args: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            args += [f"--{flag}", *map(str, value)]
        elif isinstance(value, dict):
            args += [f"--{flag}", "e=8", "head=hidden", "d=[5,5,5]"]
        else:
            args += [f"--{flag}", str(value)]
    assert parsed(*args).settings == Recipe(**given)


def test_wrong_values_on_the_command_line_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--lr", "-1"], ["--model-options", "nonsense"], ["--epochs", "two"], ["--max-seconds", "0"],
                 ["--backend", "foo"], ["--seed", "99999999999999999999"], ["--max-bad", "2"]):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            parsed(*args)
        assert stopped.value.code == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--recipe", "paper", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: 20 60 120" in shown
    assert "Learning rate at the start of each cosine cycle" in shown
