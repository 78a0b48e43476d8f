"""`recnet train`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from recnets.errors import RecNetsError
from recnets.training import Recipe, RunFolder, RunOptions, load_recipe, train
from recnets.training.recipe import recipe_changes


@dataclass
class Train:
    """Train a model. With no arguments: a small RecNet on embedded handwritten digits, in under a minute.

    The settings below show their values for the chosen recipe. Unless --recipe names one, that is `finetune` with
    --weights, else `quick` for the digits and `paper` for every other data set.
    """

    recipe: str | None = None
    """A recipe that comes with the package (paper, quick, finetune) or a TOML file of settings."""
    out: Path | None = None
    """The run folder; runs/DATE-TIME-MODEL-DATA by default."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings and options (but for its time limits)."""
    settings: Annotated[Recipe, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="recipe")] = field(default_factory=Recipe)
    options: Annotated[RunOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="run")] = field(
        default_factory=RunOptions
    )

    def run(self) -> int:
        if self.resume is not None:
            if self.out is not None and self.out != self.resume:
                raise ValueError(f"--resume {self.resume} goes on in that folder: leave --out {self.out} away")
            changes = recipe_changes(RunFolder(self.resume).read_recipe(), self.settings)
            if changes:
                raise RecNetsError(
                    f"cannot resume {self.resume} with other settings ({'; '.join(changes)}); "
                    "leave them out to go on, or start a new run with --out"
                )
        result = train(
            self.settings,
            out=self.resume or self.out,
            resume=self.resume is not None,
            options=self.options,
            console=Console(),
        )
        return 128 + signal.SIGINT if result.outcome == "interrupted" else 0


def starting_recipe(args: Sequence[str]) -> Recipe:
    """The recipe whose values are the defaults of all settings: a named one, the resumed run's, or what fits.

    One that is named beside --resume is compared with the run's like any other setting.
    """
    resume, recipe, data, weights = (_value(args, name) for name in ("--resume", "--recipe", "--data", "--weights"))
    if resume is not None and recipe is None:
        return RunFolder(resume).read_recipe()
    if recipe is None:
        recipe = "finetune" if weights is not None else "quick" if data in (None, "digits") else "paper"
    return load_recipe(recipe, **({} if weights is None else {"weights": weights}))


def _value(args: Sequence[str], name: str) -> str | None:
    """The last value given for an option, as "--name value" or "--name=value"."""
    found = None
    for i, arg in enumerate(args):
        if arg == name and i + 1 < len(args):
            found = args[i + 1]
        elif arg.startswith(f"{name}="):
            found = arg.partition("=")[2]
    return None if found == "None" else found  # as the options below read it


def parse(args: Sequence[str], prog: str) -> Callable[[], int]:
    """Read the arguments; their defaults are the recipe's, so that --help shows what will be used."""
    resume = _value(args, "--resume")
    settings = starting_recipe(args)
    options = RunOptions() if resume is None else RunFolder(resume).read_options()
    default = Train(settings=settings, options=options)
    parsed = tyro.cli(Train, prog=prog, args=list(args), default=default)
    if resume is None and parsed.settings.weights is not None and parsed.settings.model == settings.model:
        both = {**settings.model_options, **parsed.settings.model_options}  # the weights' own, and what is said here
        parsed.settings = replace(parsed.settings, model_options=both)
    return parsed.run


command = Train
