"""Layers: the recurrence as PyTorch modules."""

from recnets.layers.crc import CRC, NONLINEARITIES, PADDING_MODES
from recnets.layers.norm import SyncBatchNorm1d, SyncBatchNorm2d, convert_sync_batchnorm
from recnets.layers.recurrent import MODES, Recurrent
from recnets.layers.stem import Stem
from recnets.layers.transition import TransitionBlock

__all__ = [
    "CRC",
    "MODES",
    "NONLINEARITIES",
    "PADDING_MODES",
    "Recurrent",
    "Stem",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "TransitionBlock",
    "convert_sync_batchnorm",
]
