"""The embedded data set: scikit-learn's 1,797 handwritten digits, 8×8 and grey; nothing is downloaded."""

from __future__ import annotations

import numpy as np
import torch

from recnets.data.base import DataSet, Split, channel_stats, stratified_split
from recnets.utils import require

TEST_IMAGES = 360  # a fifth; scikit-learn's set has no split of its own
SPLIT_SEED = 0  # a constant: everybody's digits have the same test images, whatever the seed of the run


def load_digits() -> DataSet:
    """1,437 training and 360 test images, uint8 (N, 1, 8, 8), classes "0" to "9"."""
    bunch = require("sklearn.datasets", extra="data").load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
    whole = Split(torch.from_numpy(grey)[:, None], torch.from_numpy(bunch.target.astype(np.int64)))
    rest, held = stratified_split(whole.labels, TEST_IMAGES, SPLIT_SEED)
    train, test = whole.take(rest), whole.take(held)
    mean, std = channel_stats(train.images)
    return DataSet("digits", train, test, None, [str(k) for k in range(10)], mean, std)
