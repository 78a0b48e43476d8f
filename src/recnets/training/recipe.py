"""What a training run is: a typed recipe, its files, and the differences between two of them.

A `Recipe` holds everything that decides the trained weights. How a run is carried out (device, folder, time
limit, checkpoints) is in `recnets.training.options`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from recnets.errors import Misuse
from recnets.models.registry import canonical_name
from recnets.models.weights import image_size_of, read_metadata
from recnets.training.precision import Precision
from recnets.utils import did_you_mean


def parse_options(words: list[str]) -> dict[str, Any]:
    """`["e=8", "head=hidden", "d=[5, 10, 15]"]` as a dict; values are JSON where they can be, else text."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError(f"expected KEY=VALUE, got {word!r}")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def _show_options(options: dict[str, Any]) -> list[str]:
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def _as_arguments() -> Any:
    """How the command line reads and shows a table of options; a machine without tyro has no such command line."""
    try:
        import tyro
    except ImportError:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=parse_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=_show_options,
    )


ModelOptions = Annotated[dict[str, Any], _as_arguments()]

Granularity = Literal["step", "epoch"]
Decay = Literal["all", "weights"]
Init = Literal["model", "torch", "torch-1.1"]
SEED_BITS = {"seed": 63, "split_seed": 32}  # what torch's and numpy's generators take


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights; a recipe file holds only what differs from these defaults."""

    model: str = "recnet_60_1280"
    """A registered name or the paper's notation, "RecNet(4, 8, 16, 32, 10, 10, 10)"; with weights, theirs."""
    data: str = "cifar100"
    """digits, cifar10, cifar100 or folder:PATH."""
    model_options: ModelOptions = field(default_factory=dict)
    """Overrides for the model, KEY=VALUE each: e=8 head=hidden nonlinearity=relu."""
    image_size: int | None = None
    """Resize the pictures to this many pixels a side; by default the weights' or data set's size, 32 for a folder."""
    val: int = 0
    """Hold out this many training images; they, not the test set, then choose best.safetensors."""
    split_seed: int = 0
    """Seed of that split, apart from the run's seed so that runs of several seeds share the split."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and their augmentation."""

    weights: str | None = None
    """Start from this weights file, run folder or published name; for other classes the classifier starts anew."""
    init: Init = "model"
    """What else starts as: by the model's rule (He's), or PyTorch's: today's, or 1.1's, with BN's drawn from 0 to 1."""
    epochs: int = 100
    """Passes over the training set."""
    batch_size: int = 128
    """Images a step, over all processes together."""
    lr: float = 0.1
    """Learning rate at the start of each cosine cycle."""
    min_lr: float = 0.0
    """Learning rate at the end of each cosine cycle."""
    restarts: tuple[int, ...] = ()
    """Epochs at which the cosine starts again."""
    lr_granularity: Granularity = "step"
    """Set the learning rate at every step, or hold it for an epoch."""
    warmup_epochs: float = 0.0
    """Raise the learning rate linearly from 0 over this many epochs."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    dampening: float = 0.0
    """Dampening of the momentum."""
    weight_decay: float = 5e-4
    """L2 penalty, added to the gradient."""
    decay: Decay = "all"
    """What the penalty applies to: every parameter, or only weights of two or more dimensions."""

    pad: int = 4
    """Random crops after padding by this many pixels."""
    flip: bool = True
    """Random horizontal flips."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the classes."""
    mixup: float = 0.0
    """Mixup with Beta(a, a) weights; 0 is off."""
    cutmix: float = 0.0
    """CutMix with Beta(a, a) areas; 0 is off; with mixup too, each step takes one of them."""
    ema: float = 0.0
    """Decay of a running average of the weights, which is then what is evaluated and saved; 0 is off."""
    teacher: str | None = None
    """Distil from this weights file, run folder or published name."""
    distill_weight: float = 0.5
    """Weight of the teacher's soft targets in the loss, the labels have the rest."""
    distill_temperature: float = 4.0
    """Temperature of the soft targets."""

    precision: Precision = "fp32"
    """fp32, tf32 (fp32 with tensor cores' shorter products), autocast in bf16 or, for GPUs, fp16 with a scaled loss."""
    channels_last: bool = False
    """Keep images and activations in channels-last order."""
    sync_batchnorm: bool = False
    """With several processes: batch statistics over all of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_options, dict):
            raise TypeError(f"model_options must be a table of options, got {self.model_options!r}")
        object.__setattr__(self, "restarts", tuple(self.restarts))
        _check_types(self)
        for name in ("epochs", "batch_size"):
            _check(self, name, lambda v: v >= 1, "at least 1")
        for name in ("val", "pad"):
            _check(self, name, lambda v: v >= 0, "0 or more")
        for name, bits in SEED_BITS.items():
            _check(self, name, lambda v, bits=bits: 0 <= v < 2**bits, f"0 or more and less than 2**{bits}")
        _check(self, "image_size", lambda v: v is None or v >= 1, "at least 1")
        _check(self, "lr", lambda v: v > 0, "greater than 0")
        _check(self, "min_lr", lambda v: 0 <= v <= self.lr, f"between 0 and lr ({self.lr})")
        for name in ("momentum", "dampening", "label_smoothing", "ema"):
            _check(self, name, lambda v: 0 <= v < 1, "in [0, 1)")
        for name in ("weight_decay", "mixup", "cutmix"):
            _check(self, name, lambda v: v >= 0, "0 or more")
        _check(self, "distill_weight", lambda v: 0 <= v <= 1, "between 0 and 1")
        _check(self, "distill_temperature", lambda v: v > 0, "greater than 0")
        _check(self, "warmup_epochs", lambda v: 0 <= v <= self.epochs, f"between 0 and epochs ({self.epochs})")
        bounds = (0, *self.restarts, self.epochs)
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"restarts must be rising epochs between 0 and epochs ({self.epochs}), got {list(self.restarts)}; "
                "none (--restarts alone, or restarts=[] where settings are KEY=VALUE) is one cosine, "
                "--epochs-until stops early in a longer schedule"
            )
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                "nesterov needs momentum above 0 and dampening 0, "
                f"got momentum {self.momentum} and dampening {self.dampening}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (lists for tuples), as they go into config.toml, checkpoints and metadata."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "restarts": list(self.restarts), "model_options": dict(self.model_options)}


_HINTS = get_type_hints(Recipe)  # plain types: Annotated is dropped, Literal is kept
_NUMBERS = (int, float)


def _check(recipe: Recipe, name: str, good: Any, expected: str) -> None:
    value = getattr(recipe, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if not good(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _check_types(recipe: Recipe) -> None:
    """A recipe file is written by hand: `lr = "0.1"` or `precision = "fp16"` must not get far."""
    for name, hint in _HINTS.items():
        value = getattr(recipe, name)
        options = [a for a in get_args(hint) if isinstance(a, str)]
        if options:
            if value not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
            continue
        kinds = [a for a in get_args(hint) if isinstance(a, type)] if hint in (int | None, str | None) else []
        kind = kinds[0] if kinds else hint
        if kinds and value is None:
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(recipe, name, float(value))
            continue
        if kind == tuple[int, ...]:
            if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                raise TypeError(f"{name} must be whole numbers, got {list(value)!r}")
            continue
        if isinstance(kind, type) and (not isinstance(value, kind) or (kind in _NUMBERS and isinstance(value, bool))):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}")


def recipe_from_dict(values: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """A recipe from plain values; unknown names are errors that suggest the nearest."""
    known = {f.name for f in dataclasses.fields(Recipe)}
    for name in values:
        if name not in known:
            raise Misuse(f"{source}: unknown setting {name!r}{did_you_mean(name, known)}")
    try:
        return Recipe(**values)
    except (TypeError, ValueError) as error:
        raise Misuse(f"{source}: {error}") from error


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("recnets") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _from_weights(weights: str, file: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The values of a recipe that starts from weights: what nobody sets is as in their own training.

    Only who names the weights may name another model beside them; options are laid over the weights' own.
    """
    metadata = read_metadata(weights)
    model, (height, width) = metadata.get("model", {}), image_size_of(metadata)
    theirs = {"image_size": height if height == width else None, "data": (metadata.get("recipe") or {}).get("data")}
    said = overrides if "weights" in overrides else {**file, **overrides}
    values = {key: value for key, value in theirs.items() if value is not None} | file
    values |= {"model": model.get("name"), "model_options": model.get("overrides", {})} | said
    if canonical_name(str(values["model"])) != model.get("name"):
        values["model_options"] = said.get("model_options", {})
    elif isinstance(values["model_options"], dict):
        values["model_options"] = {**model.get("overrides", {}), **values["model_options"]}
    return values


def load_recipe(name_or_path: str | Path, **overrides: Any) -> Recipe:
    """A recipe by name ("paper", "quick", "finetune") or from a TOML file, with `overrides` on top.

    Where it starts from weights, model, data and the size of the pictures are theirs unless others are named.

    >>> load_recipe("paper", data="cifar10", seed=1).restarts
    (20, 60, 120)
    """
    name = str(name_or_path)
    if name in recipe_names():
        text = (resources.files("recnets") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise Misuse(
            f"no recipe {name!r}: neither a file nor one of {', '.join(recipe_names())}"
            f"{did_you_mean(name, recipe_names())}"
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Misuse(f"recipe {name}: not valid TOML: {error}") from error
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
    weights = overrides.get("weights", values.get("weights"))
    values = _from_weights(weights, values, overrides) if isinstance(weights, str) else {**values, **overrides}
    return recipe_from_dict(values, source=f"recipe {name}")


def recipe_changes(old: Recipe, new: Recipe) -> list[str]:
    """`["lr: 0.1 -> 0.2", ...]`: what differs, for the error of a resume with other settings."""
    before, after = old.to_dict(), new.to_dict()
    return [f"{name}: {before[name]!r} -> {after[name]!r}" for name in before if before[name] != after[name]]
