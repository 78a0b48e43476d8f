"""The input pipeline: the whole split on the device as uint8, and an order and augmentation fixed by a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recnets.data.augment import Augment, Normalise, crop_flip, pad_images
from recnets.data.base import Split
from recnets.utils import positive_int

# Images augmented in one pass: enough that launching kernels costs nothing a step, small enough for the cache.
BLOCK_IMAGES = 1024


@dataclass(frozen=True)
class Batch:
    """This rank's part of a global batch of `global_size` images; images uint8 (n, C, H, W), labels int64 (n,).

    n is 0 where the last global batch has fewer images than there are ranks.
    """

    images: Tensor
    labels: Tensor
    global_size: int


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A CPU generator that is a pure function of (seed, epoch), with unrelated streams for neighbours."""
    digest = hashlib.blake2b(f"recnets epoch {seed} {epoch}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class EpochLoader:
    """Batches of a split for one rank of `world`; each image exactly once an epoch over all ranks.

    Global batch b holds the images b·batch_size … of the epoch's order (the last may be smaller) and rank r
    takes every world-th of them, beginning with the r-th. All draws of an epoch come from `(seed, epoch)` on the
    CPU, so every device and rank sees the same order, and an epoch can be entered at any step.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        positive_int(batch_size, "batch_size")
        positive_int(world, "world")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be at least 0 and less than world={world}, got {rank}")
        if batch_size < world:
            raise ValueError(f"batch_size={batch_size} is over all ranks and must be at least world={world}")
        if len(split) == 0:
            raise ValueError("the split has no images")
        if len(mean) != split.images.shape[1]:
            raise ValueError(f"mean has {len(mean)} values, the images have {split.images.shape[1]} channels")
        self.batch_size, self.augment, self.seed, self.shuffle = batch_size, augment, seed, shuffle
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.total = len(split)
        self.steps = -(-self.total // batch_size)
        self.normalise = Normalise(mean, std, self.device)
        self._pad = augment.pad if augment is not None else 0
        self._images = pad_images(split.images.to(self.device), self._pad)
        self._labels = split.labels.to(self.device)
        self._share = len(range(rank, batch_size, world))  # of a full batch
        self._batches_a_block = max(1, BLOCK_IMAGES // self._share)
        # Every epoch draws into the same memory and with one thread: the device waits meanwhile, and fresh pages and
        # sleeping threads have been seen to make 3 ms of work take 50 on a virtual machine.
        self._draws = torch.empty(4, self.total, dtype=torch.int64)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from `start_step` on: exactly those that an uninterrupted epoch would give."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= start_step <= self.steps:
            raise ValueError(f"start_step must be from 0 to {self.steps} (the steps of an epoch), got {start_step}")
        return self._batches(epoch, start_step)

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        if start_step == self.steps:
            return
        plan = self._plan(epoch)
        for first in range(start_step, self.steps, self._batches_a_block):
            last = min(first + self._batches_a_block, self.steps)
            # Every batch before the last is full, so slicing past the end only shortens the last one.
            images, labels = self._block(plan, first * self._share, last * self._share)
            for step in range(first, last):
                here = slice((step - first) * self._share, (step - first + 1) * self._share)
                size = min(self.batch_size, self.total - step * self.batch_size)
                yield Batch(images[here], labels[here], size)

    def _plan(self, epoch: int) -> Tensor:
        """int64 (4, n): which image, the top and left of its window, and whether it is mirrored, for this rank.

        Drawn for all images whatever the rank and the options, so that no option moves another's draws.
        """
        generator = epoch_generator(self.seed, epoch)
        draws = self._draws
        torch.randperm(self.total, generator=generator, out=draws[0])
        draws[1:3].random_(0, 2 * self._pad + 1, generator=generator)
        draws[3].random_(0, 2, generator=generator)
        if not self.shuffle:
            torch.arange(self.total, out=draws[0])
        if self.world > 1:
            draws = draws[:, torch.arange(self.total) % self.batch_size % self.world == self.rank]
        return draws.to(self.device, copy=True)

    def _block(self, plan: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Augmented images and labels of this rank's positions start … stop - 1."""
        if self.augment is None and not self.shuffle and self.world == 1:
            return self._images[start:stop], self._labels[start:stop]  # views: evaluation copies nothing
        index, top, left, mirrored = plan[:, start:stop]
        flip = mirrored.bool() if self.augment is not None and self.augment.flip else None
        return crop_flip(self._images, index, top, left, flip, self._pad), self._labels[index]
