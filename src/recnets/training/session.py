"""From a recipe and a data set to the objects that train: model, loader, step, evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recnets.data import Augment, DataSet, EpochLoader
from recnets.errors import Misuse, RecNetsError
from recnets.layers import CRC, convert_sync_batchnorm
from recnets.models import create_model
from recnets.models.weights import config_of, load_tensors, read_metadata, read_weights
from recnets.training.distill import load_teacher
from recnets.training.distributed import Processes
from recnets.training.ema import WeightAverage
from recnets.training.evaluate import Evaluator
from recnets.training.mix import Mixer
from recnets.training.objective import Objective
from recnets.training.options import RunOptions
from recnets.training.precision import allow_tf32
from recnets.training.progress import counted
from recnets.training.recipe import Recipe
from recnets.training.step import TrainStep, make_optimizer, preserved


@dataclass
class Session:
    """All that a run works with."""

    recipe: Recipe
    options: RunOptions
    data: DataSet
    device: torch.device
    processes: Processes
    model: nn.Module
    loader: EpochLoader
    step: TrainStep
    mixer: Mixer | None
    test: Evaluator
    val: Evaluator | None
    start: str = ""
    """What the weights were before the first step, where that was not chance."""

    @property
    def judged(self) -> nn.Module:
        """The weights that are evaluated and saved: their average, where there is one."""
        return self.model if self.step.average is None else self.step.average.model


def build_session(
    recipe: Recipe,
    options: RunOptions,
    data: DataSet,
    device: torch.device,
    processes: Processes,
    *,
    resumed: bool = False,
) -> Session:
    """Everything fresh and seeded; the same on every process. A `resumed` run has weights of its own by now."""
    allow_tf32(recipe.precision, device)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # shapes are fixed
    torch.manual_seed(recipe.seed)
    model = build_model(recipe, options, data)
    start = "" if recipe.weights is None or resumed else load_initial(model, recipe.weights, data)
    model = model.to(device)
    _check_fit(model, data, device)
    model.train()
    _check_smallest_batch(model, recipe, data, device, processes)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.sync_batchnorm:
        model = convert_sync_batchnorm(model)
    loader = _build_loader(recipe, data, device, processes)
    average = WeightAverage(model, recipe.ema) if recipe.ema > 0 else None
    teacher = load_teacher(recipe.teacher, data, device) if recipe.teacher is not None else None
    step = TrainStep(
        model,
        make_optimizer(
            model,
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            dampening=recipe.dampening,
            weight_decay=recipe.weight_decay,
            decay=recipe.decay,
            device=device,
        ),
        Objective(recipe.label_smoothing, teacher, recipe.distill_weight, recipe.distill_temperature),
        loader.normalise,
        forward=_wrap(model, options, device, processes),
        device=device,
        precision=recipe.precision,
        channels_last=recipe.channels_last,
        average=average,
        world=processes.world,
        graph=_use_graph(options, device, processes),
    )
    mixed = recipe.mixup > 0 or recipe.cutmix > 0
    mixer = Mixer(recipe.mixup, recipe.cutmix, data.image_size, recipe.seed) if mixed else None

    def evaluator(split_name: str) -> Evaluator:
        return Evaluator(
            getattr(data, split_name),
            data.num_classes,
            mean=data.mean,
            std=data.std,
            device=device,
            batch_size=options.eval_batch,
            precision=recipe.precision,
            channels_last=recipe.channels_last,
            processes=processes,
        )

    val = evaluator("val") if data.val is not None else None
    return Session(recipe, options, data, device, processes, model, loader, step, mixer, evaluator("test"), val, start)


def build_model(recipe: Recipe, options: RunOptions, data: DataSet) -> nn.Module:
    """The model for this data; a wrong name or option is a clear error."""
    overrides: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.model_options.items()}
    if options.backend != "auto":
        overrides["backend"] = options.backend
    try:
        model = create_model(recipe.model, num_classes=data.num_classes, in_channels=data.in_channels, **overrides)
    except (TypeError, ValueError) as error:
        if overrides and isinstance(error, TypeError):
            raise Misuse(f"{recipe.model} cannot be built with {overrides}: {error}") from error
        raise Misuse(str(error)) from error
    if recipe.init != "model":
        model.apply(_as_torch_does)
    if recipe.init == "torch-1.1":
        model.apply(_norms_of_2019)
    return model


def load_initial(model: nn.Module, source: str, data: DataSet) -> str:
    """Copy trained weights into the model, its classifier only if they know the same classes; says what it did."""
    config, tensors, path = read_weights(source)
    if config.in_channels != data.in_channels:
        theirs, ours = (counted(channels, "channel") for channels in (config.in_channels, data.in_channels))
        raise Misuse(f"the weights {source} are for pictures of {theirs}, those of {data.name} have {ours}")
    same = read_metadata(path).get("classes") == data.classes
    try:
        load_tensors(model, tensors, path, skip=() if same else ("classifier.",))
    except RecNetsError as error:
        asked = config_of(model)
        why = f"; {error}" if asked.name == config.name else ""
        raise Misuse(
            f"the weights {source} are of {config.name}, and do not fit the {asked.name} that is to be trained: "
            f"name no model beside weights{why}"
        ) from error
    return f"from {source}" + ("" if same else ", with a new classifier")


@torch.no_grad()
def _check_fit(model: nn.Module, data: DataSet, device: torch.device) -> None:
    """Run one blank picture: what is too small for the model is found before anything is written."""
    try:
        model.eval()(torch.zeros(1, data.in_channels, *data.image_size, device=device))
    except ValueError as error:
        raise Misuse(str(error)) from error


@torch.no_grad()
def _check_smallest_batch(
    model: nn.Module, recipe: Recipe, data: DataSet, device: torch.device, processes: Processes
) -> None:
    """Where a batch has one image, train on a blank one: a BN of vectors cannot normalise a single value.

    It would show at the end of the first epoch only. The model stays as it was.
    """
    last = _last_batch(recipe, data)
    if last // processes.world != 1 or (recipe.sync_batchnorm and processes.world > 1):
        return
    try:
        with preserved(list(model.state_dict().values()), device):
            model(torch.zeros(1, data.in_channels, *data.image_size, device=device))
    except ValueError as error:
        share = f", only one for some of the {processes.world} processes" if processes.world > 1 else ""
        raise Misuse(
            f"with batches of {recipe.batch_size}, the last one of {len(data.train)} images has {last}{share}: too few "
            f"for the batch normalisation of this model ({error}); choose another batch_size"
        ) from error


def _last_batch(recipe: Recipe, data: DataSet) -> int:
    """Images of an epoch's last batch, of all processes together."""
    return len(data.train) % recipe.batch_size or recipe.batch_size


@torch.no_grad()
def _as_torch_does(module: nn.Module) -> None:
    """PyTorch's default initial weights; a CRC layer's kernels like a convolution's, its bias stays 0."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        module.reset_parameters()
    elif isinstance(module, CRC):
        for weight in (module.weight_x, module.weight_h):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


@torch.no_grad()
def _norms_of_2019(module: nn.Module) -> None:
    """BN's weights as PyTorch drew them up to version 1.1: uniformly from 0 to 1; its biases were 0 as today."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
        nn.init.uniform_(module.weight)


def _build_loader(recipe: Recipe, data: DataSet, device: torch.device, processes: Processes) -> EpochLoader:
    last = _last_batch(recipe, data)
    if last < processes.world:
        raise Misuse(
            f"with batches of {recipe.batch_size}, the last one of {len(data.train)} images has {last}: fewer than "
            f"the {processes.world} processes; choose another batch_size"
        )
    return EpochLoader(
        data.train,
        recipe.batch_size,
        mean=data.mean,
        std=data.std,
        augment=Augment(recipe.pad, recipe.flip),
        seed=recipe.seed,
        device=device,
        shuffle=True,
        rank=processes.rank,
        world=processes.world,
    )


def _wrap(
    model: nn.Module, options: RunOptions, device: torch.device, processes: Processes
) -> Callable[[Tensor], Tensor]:
    """For several processes and for torch.compile; the plain model stays what is saved."""
    forward: nn.Module = model
    if processes.world > 1:
        idle = any(crc.recurrent and crc.d == 1 for crc in model.modules() if isinstance(crc, CRC))  # their W_h
        devices = [device] if device.type == "cuda" else None
        forward = nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=idle)
    if options.compile:
        # An epoch has two batch sizes at most: two compilations, and no symbolic shapes.
        return torch.compile(forward, dynamic=False)
    return forward


def _use_graph(options: RunOptions, device: torch.device, processes: Processes) -> bool:
    possible = device.type == "cuda" and processes.world == 1
    if options.graph == "on" and not possible:
        raise Misuse("--graph on needs one process on a CUDA device; use --graph auto")
    return possible and options.graph != "off"
