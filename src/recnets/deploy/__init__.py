"""From a trained model to a device: fast inference in PyTorch, smaller networks, exported files."""

from recnets.deploy.optimize import optimize

__all__ = ["optimize"]
