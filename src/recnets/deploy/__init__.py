"""From a trained model to a device: fast inference in PyTorch, smaller networks, exported files."""

from recnets.deploy.export import export
from recnets.deploy.optimize import optimize
from recnets.deploy.squeeze import squeeze

__all__ = ["export", "optimize", "squeeze"]
