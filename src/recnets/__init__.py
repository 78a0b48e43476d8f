"""RecNets: channel-wise recurrent convolutional networks (Retsinas et al., 2019)."""

from recnets.layers import CRC, Recurrent, TransitionBlock
from recnets.models import RecNet, create_model, list_models, profile

__version__ = "0.1.0"

__all__ = ["CRC", "RecNet", "Recurrent", "TransitionBlock", "create_model", "list_models", "profile"]
