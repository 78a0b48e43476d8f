"""Models: the RecNet family and the networks it is compared with, by name."""

from recnets.models.recnet import RecNet
from recnets.models.registry import (
    ModelConfig,
    ModelInfo,
    create_model,
    list_models,
    model_info,
    register_model,
)

__all__ = [
    "ModelConfig",
    "ModelInfo",
    "RecNet",
    "create_model",
    "list_models",
    "model_info",
    "register_model",
]
