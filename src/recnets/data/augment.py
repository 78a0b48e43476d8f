"""Random crop and flip on uint8 images, and normalisation: whole batches at a time, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Augment:
    """Random crop after padding with `pad` black pixels on each side, then a mirror image half of the time."""

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.pad, bool) or not isinstance(self.pad, int) or self.pad < 0:
            raise ValueError(f"pad must be an int of at least 0, got {self.pad!r}")


def pad_images(images: Tensor, pad: int) -> Tensor:
    """Black borders: (N, C, H, W) -> (N, C, H + 2 pad, W + 2 pad). Zero in uint8 is black before normalisation."""
    return functional.pad(images, (pad, pad, pad, pad)) if pad else images


def crop_flip(padded: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor | None, pad: int) -> Tensor:
    """Image `index[i]` cropped at (`top[i]`, `left[i]`) and mirrored where `flip[i]`.

    padded: (N, C, H + 2 pad, W + 2 pad); index, top, left: int64 (n,), top and left in 0 … 2 pad; flip: bool (n,)
    or None. Returns (n, C, H, W). One gather over a view of all windows, so rows are copied whole, and no
    operation waits for the device.
    """
    height, width = padded.shape[2] - 2 * pad, padded.shape[3] - 2 * pad
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2 pad + 1, 2 pad + 1, H, W), no copy
    out = windows[index, :, top, left]
    if flip is None:
        return out
    return torch.where(flip[:, None, None, None], out.flip(-1), out)


class Normalise:
    """uint8 (n, C, H, W) -> float32 (x / 255 - mean) / std, as one multiply and one add.

    Its constants are made once on `device`, so a call can be captured in a CUDA graph.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device | str | None = None) -> None:
        if not mean or len(mean) != len(std):
            raise ValueError(f"mean and std must have one value a channel, got {len(mean)} and {len(std)}")
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {tuple(std)}")
        centre = torch.tensor(mean, dtype=torch.float64)
        spread = torch.tensor(std, dtype=torch.float64)
        self.scale = (1 / (255 * spread)).float().view(-1, 1, 1).to(device)
        self.shift = (-centre / spread).float().view(-1, 1, 1).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(torch.float32) * self.scale + self.shift
