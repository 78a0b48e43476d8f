"""Mixup and CutMix as one operation: a mask of weights between a batch and its mirror image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Mixer:
    """Draws the mask of every step of an epoch, a pure function of (seed, epoch).

    Mixup (Zhang et al. 2018) is a constant mask, CutMix (Yun et al. 2019) one with a box of zeros; image i is
    mixed with image n−1−i of the batch. Where both are on, each step takes one of them with equal chance.
    """

    def __init__(self, mixup: float, cutmix: float, image_size: tuple[int, int], seed: int) -> None:
        self.mixup, self.cutmix, self.image_size, self.seed = mixup, cutmix, image_size, seed

    def epoch(self, epoch: int, steps: int) -> tuple[Tensor, Tensor]:
        """Masks (steps, H, W) and shares (steps,): how much of each image and of its own label stays."""
        rng = np.random.default_rng([self.seed, epoch, 0x6D6978])
        height, width = self.image_size
        masks = np.ones((steps, height, width), dtype=np.float32)
        shares = np.ones(steps, dtype=np.float32)
        for i in range(steps):
            cut = self.cutmix > 0 and (self.mixup == 0 or rng.random() < 0.5)
            share = rng.beta(self.cutmix, self.cutmix) if cut else rng.beta(self.mixup, self.mixup)
            if cut:
                top, bottom, left, right = _box(rng, share, height, width)
                masks[i, top:bottom, left:right] = 0
                share = 1 - (bottom - top) * (right - left) / (height * width)  # what the border left of it
            else:
                masks[i] = share
            shares[i] = share
        return torch.from_numpy(masks), torch.from_numpy(shares)


def _box(rng: np.random.Generator, share: float, height: int, width: int) -> tuple[int, int, int, int]:
    """A box of (1 − share) of the area around a uniform centre, clipped to the image."""
    side = float(np.sqrt(1 - share))
    cut_h, cut_w = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = max(y - cut_h // 2, 0), max(x - cut_w // 2, 0)
    return top, min(y - cut_h // 2 + cut_h, height), left, min(x - cut_w // 2 + cut_w, width)


def mix_images(images: Tensor, mask: Tensor) -> Tensor:
    """mask · images + (1 − mask) · mirrored batch; images (n, C, H, W), mask (H, W)."""
    return mask * images + (1 - mask) * images.flip(0)
