"""Data sets as uint8 tensors, and the loader that crops, flips and normalises them on the training device."""

from recnets.data.augment import Augment, Normalise, crop_flip
from recnets.data.base import DataSet, Split, channel_stats, stratified_split
from recnets.data.folder import read_picture
from recnets.data.load import default_data_dir, load_dataset
from recnets.data.loader import Batch, EpochLoader
from recnets.data.trained_on import data_of, normalisation_of, spec_of

__all__ = [
    "Augment",
    "Batch",
    "DataSet",
    "EpochLoader",
    "Normalise",
    "Split",
    "channel_stats",
    "crop_flip",
    "data_of",
    "default_data_dir",
    "load_dataset",
    "normalisation_of",
    "read_picture",
    "spec_of",
    "stratified_split",
]
