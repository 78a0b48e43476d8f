"""The sampler and the augmentation against slow versions that work image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recnets.data import Augment, EpochLoader, Normalise, Split, crop_flip, loader
from recnets.data.augment import pad_images


def make_split(count, channels=3, height=6, width=5):
    """Random images whose label is their index."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(count))


def make_loader(split, batch_size=8, **options):
    channels = split.images.shape[1]
    return EpochLoader(split, batch_size, **{"mean": [0.5] * channels, "std": [0.25] * channels} | options)


def slow_crop_flip(image, top, left, mirrored, pad):
    """One image, one pixel at a time: pad with black, crop, mirror."""
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                column = width - 1 - x if mirrored else x
                source_y, source_x = y + top - pad, column + left - pad
                if 0 <= source_y < height and 0 <= source_x < width:
                    out[c, y, x] = image[c, source_y, source_x]
    return out


@pytest.mark.parametrize("pad", [0, 1, 4, 7])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 6, 5), (4, 1, 3)])
def test_crop_flip_is_the_slow_one(pad, flip, shape):
    split = make_split(10, *shape)
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(0, 10, (25,), generator=generator)
    top, left = torch.randint(0, 2 * pad + 1, (2, 25), generator=generator)
    mirrored = torch.randint(0, 2, (25,), generator=generator).bool()
    got = crop_flip(pad_images(split.images, pad), index, top, left, mirrored if flip else None, pad)
    for k in range(25):
        image = split.images[index[k]].numpy()
        expected = slow_crop_flip(image, int(top[k]), int(left[k]), flip and bool(mirrored[k]), pad)
        assert np.array_equal(got[k].numpy(), expected)
    assert got.is_contiguous()
    assert got.dtype == torch.uint8


def test_every_window_and_mirror_image_occurs():
    """Over some epochs each image is seen in all (2 pad + 1)² windows, mirrored and not, about equally often."""
    split = make_split(40, 1, 4, 4)
    pad = 1
    seen = np.zeros((3, 3, 2), dtype=int)
    source = make_loader(split, 40, augment=Augment(pad=pad, flip=True), shuffle=False)
    for epoch in range(90):
        (batch,) = source.epoch(epoch)
        for image, got in zip(split.images.numpy(), batch.images.numpy(), strict=True):
            matches = [
                (top, left, mirrored)
                for top in range(3)
                for left in range(3)
                for mirrored in range(2)
                if np.array_equal(got, slow_crop_flip(image, top, left, bool(mirrored), pad))
            ]
            assert len(matches) == 1
            seen[matches[0]] += 1
    assert seen.sum() == 3600
    assert seen.min() > 140  # 200 expected, standard deviation 14
    assert seen.max() < 260


@pytest.mark.parametrize("augment", [None, Augment(0, False)])
def test_without_augmentation_images_come_unchanged(augment):
    split = make_split(20)
    for batch in make_loader(split, augment=augment, shuffle=True).epoch(3):
        assert torch.equal(batch.images, split.images[batch.labels])


def test_flip_alone():
    split = make_split(200)
    (batch,) = make_loader(split, 200, augment=Augment(pad=0, flip=True), shuffle=False).epoch(0)
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(batch.images, split.images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(batch.images, split.images, strict=True)]
    assert all(m != s for m, s in zip(mirrored, same, strict=True))
    assert 60 < sum(mirrored) < 140


def test_evaluation_copies_nothing():
    split = make_split(20)
    batches = list(make_loader(split, 8, shuffle=False).epoch(0))
    assert torch.cat([batch.labels for batch in batches]).tolist() == list(range(20))
    assert batches[1].images.data_ptr() == split.images[8:].data_ptr()


@pytest.mark.parametrize("block", [1, 20, 1024])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("count", "batch_size"), [(50, 8), (48, 8), (7, 8), (49, 8), (50, 7), (50, 50), (50, 3)])
def test_each_image_once_an_epoch_over_all_ranks(monkeypatch, count, batch_size, world, block):
    monkeypatch.setattr(loader, "BLOCK_IMAGES", block)
    split = make_split(count, 1, 2, 2)
    whole = make_loader(split, batch_size, seed=5)
    ranks = [make_loader(split, batch_size, seed=5, rank=r, world=world) for r in range(world)]
    seen = []
    batches = [list(rank.epoch(2)) for rank in ranks]
    reference = list(whole.epoch(2))
    assert {len(b) for b in batches} == {whole.steps} == {-(-count // batch_size)}
    for step, expected in enumerate(reference):
        for r in range(world):
            part = batches[r][step]
            assert part.labels.tolist() == expected.labels[r::world].tolist()
            assert torch.equal(part.images, split.images[part.labels])
            assert part.global_size == len(expected.labels) == expected.global_size
            seen += part.labels.tolist()
    assert sorted(seen) == list(range(count))


def test_ranks_augment_as_one_process_does():
    split = make_split(50)
    options = {"augment": Augment(2, True), "seed": 3}
    whole = list(make_loader(split, 8, **options).epoch(1))
    for r in range(3):
        part = list(make_loader(split, 8, rank=r, world=3, **options).epoch(1))
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a.images[r::3], b.images)


def test_the_last_batch_may_leave_a_rank_nothing():
    split = make_split(9)
    last = list(make_loader(split, 8, rank=1, world=2).epoch(0))[-1]
    assert last.images.shape == (0, 3, 6, 5)
    assert last.global_size == 1


@pytest.mark.parametrize("block", [1, 20, 1024])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_epoch_is_the_rest_of_the_whole_one(monkeypatch, block, rank):
    monkeypatch.setattr(loader, "BLOCK_IMAGES", block)
    source = make_loader(make_split(50), augment=Augment(), seed=9, rank=rank, world=2)
    whole = list(source.epoch(4))
    fresh = make_loader(make_split(50), augment=Augment(), seed=9, rank=rank, world=2)
    for start in range(source.steps + 1):
        rest = list(fresh.epoch(4, start_step=start))
        assert len(rest) == source.steps - start
        for a, b in zip(whole[start:], rest, strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.labels, b.labels)
            assert a.global_size == b.global_size


def order(source, epoch):
    return torch.cat([batch.labels for batch in source.epoch(epoch)]).tolist()


def test_an_epoch_is_a_function_of_seed_and_epoch_alone():
    split = make_split(50)
    source = make_loader(split, augment=Augment(), seed=1)
    first = list(source.epoch(0))
    torch.manual_seed(99)  # the global generator has no say
    list(source.epoch(1))
    again = list(make_loader(split, augment=Augment(), seed=1).epoch(0))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.images, b.images)
    orders = [order(make_loader(split, seed=seed), epoch) for seed in (1, 2, 12) for epoch in (0, 1, 2, 21)]
    assert len({tuple(o) for o in orders}) == 12


def test_the_order_is_the_same_whatever_the_augmentation_and_batch_size():
    split = make_split(50)
    expected = order(make_loader(split, seed=4), 7)
    for options in ({"augment": Augment(1, False)}, {"augment": Augment(4, True)}, {"batch_size": 13}):
        assert order(make_loader(split, seed=4, **options), 7) == expected


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(make_loader(make_split(20), augment=Augment()).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_normalise_is_the_formula():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    got = make_loader(Split(images, torch.zeros(2, dtype=torch.int64)), mean=mean, std=std).normalise(images)
    centre, spread = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (mean, std))
    expected = (images.double() / 255 - centre) / spread
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_normalise_keeps_channels_last():
    images = make_split(4).images.to(memory_format=torch.channels_last)
    got = Normalise([0.5] * 3, [0.2] * 3)(images)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"world": 0}, "world must be at least 1"),
        ({"rank": 2, "world": 2}, "rank must be at least 0 and less than world=2, got 2"),
        ({"rank": -1}, "rank must be at least 0"),
        ({"batch_size": 2, "world": 3}, "batch_size=2 is over all ranks and must be at least world=3"),
        ({"mean": [0.5]}, "mean has 1 values, the images have 3 channels"),
        ({"std": [0.5]}, "one value a channel, got 3 and 1"),
        ({"std": [0.5, 0.0, 0.5]}, "std must be positive"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make_loader(make_split(20), **options)


def test_wrong_epochs_and_steps_are_refused_at_once():
    source = make_loader(make_split(20))
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        source.epoch(-1)
    for step in (-1, 4):
        with pytest.raises(ValueError, match=f"start_step must be from 0 to 3 .*, got {step}"):
            source.epoch(0, start_step=step)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="no images"):
        make_loader(Split(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)))


@pytest.mark.parametrize("pad", [-1, 1.5, True])
def test_wrong_padding(pad):
    with pytest.raises(ValueError, match="pad must be an int of at least 0"):
        Augment(pad=pad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_same_batches():
    split = make_split(3000, 3, 32, 32)
    options = {"batch_size": 64, "augment": Augment(), "seed": 6}
    for a, b in zip(
        make_loader(split, **options).epoch(1), make_loader(split, device="cuda", **options).epoch(1), strict=True
    ):
        assert torch.equal(a.images, b.images.cpu())
        assert torch.equal(a.labels, b.labels.cpu())
