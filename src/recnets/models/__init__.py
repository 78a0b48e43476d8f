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
from recnets.models.weights import load_weights, published, read_metadata, save_weights

__all__ = [
    "ModelConfig",
    "ModelInfo",
    "RecNet",
    "create_model",
    "list_models",
    "load_weights",
    "model_info",
    "published",
    "read_metadata",
    "register_model",
    "save_weights",
]
