"""Models: the RecNet family and the networks it is compared with, by name."""

from recnets.models.profile import LayerProfile, Profile, profile
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

# isort: split
from recnets.models import baselines  # after the RecNets: the order of registration is that of the tables

__all__ = [
    "LayerProfile",
    "ModelConfig",
    "ModelInfo",
    "Profile",
    "RecNet",
    "baselines",
    "create_model",
    "list_models",
    "load_weights",
    "model_info",
    "profile",
    "published",
    "read_metadata",
    "register_model",
    "save_weights",
]
