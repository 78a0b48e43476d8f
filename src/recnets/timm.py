"""`import recnets.timm`, and timm builds RecNets by name: `timm.create_model("recnet_60_1280")`.

Published weights are there under the same names (`timm.create_model("recnet_60_480.cifar100", pretrained=True)`),
with the normalisation and the size of pictures that `timm.data.resolve_model_data_config` reads. `features_only=True`
gives the output of each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recnets.data.cifar import CIFAR10
from recnets.models import RecNet, create_model, list_models, published, read_metadata
from recnets.models.weights import PUBLISHED_FOLDER, SUFFIX

try:
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
except Exception as error:  # a torchvision built for another PyTorch raises RuntimeError
    raise ImportError(
        f"recnets.timm needs timm, which cannot be imported here ({type(error).__name__}: {error}): "
        "pip install 'recnets[timm]', with a torchvision that is built for this PyTorch"
    ) from error

__all__: list[str] = []  # timm adds the names that it registers

UNTRAINED = "untrained"


def _cfg(**known: Any) -> dict[str, Any]:
    """timm's record of what weights expect of pictures, and where the classifier is."""
    return {
        "input_size": (3, 32, 32),
        "num_classes": 10,
        "mean": CIFAR10.mean,  # weights bring their own
        "std": CIFAR10.std,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "first_conv": "stem.conv",
        "classifier": "classifier",
        "license": "apache-2.0",
        "paper_name": "RecNets: Channel-wise Recurrent Convolutional Neural Networks",
        "origin_url": "https://doi.org/10.5244/C.33.214",
        **known,
    }


def published_cfgs() -> dict[str, dict[str, Any]]:
    """The records of published weights of RecNets by "ARCH.TAG".

    A name is one network to timm, so weights with hyper-parameters of their own (squeezed ones, say) are left out.
    """
    cfgs = {}
    for name in published():
        about = read_metadata(name)
        config, normalisation = about["model"], about["normalisation"]
        if config["overrides"] or config["name"] not in list_models("recnet_*"):
            continue
        cfgs[name] = _cfg(
            file=str(PUBLISHED_FOLDER / f"{name}{SUFFIX}"),
            input_size=(config["in_channels"], *about["image_size"]),
            num_classes=config["num_classes"],
            mean=tuple(normalisation["mean"]),
            std=tuple(normalisation["std"]),
            label_names=tuple(about["classes"]),
        )
    return cfgs


def build(name: str, *, in_chans: int = 3, num_classes: int = 10, drop_rate: float = 0.0, **overrides: Any) -> RecNet:
    """A RecNet by timm's arguments; overrides are those of `recnets.create_model`."""
    if drop_rate:
        raise ValueError(f"RecNets have no dropout, got drop_rate={drop_rate}")
    model = create_model(name, in_channels=in_chans, num_classes=num_classes, **overrides)
    assert isinstance(model, RecNet)
    widths = [s_i * d_i for s_i, d_i in zip(model.s, model.d, strict=True)]
    following = [*widths[1:], widths[-1]]
    model.feature_info = [  # type: ignore[assignment]
        {"num_chs": c, "reduction": 2**i, "module": f"stages.{i}"} for i, c in enumerate(following)
    ]
    return model


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    """The function that timm calls for a name."""

    def make(**options: Any) -> RecNet:
        return build(name, **options)

    def entrypoint(pretrained: bool = False, **options: Any) -> nn.Module:
        stages = {"out_indices": (0, 1, 2), "feature_cls": "hook"}
        return build_model_with_cfg(make, name, pretrained, feature_cfg=stages, **options)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    return entrypoint


# timm looks for this in the module of the functions that it registers.
default_cfgs = generate_default_cfgs(
    {**published_cfgs(), **{f"{n}.{UNTRAINED}": _cfg() for n in list_models("recnet_*")}}
)
for _name in list_models("recnet_*"):
    globals()[_name] = register_model(_entrypoint(_name))
