from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from recnets.training.distill import distillation_loss
from recnets.training.ema import WeightAverage
from recnets.training.mix import Mixer, mix_images
from recnets.training.objective import Objective


def test_mixer_is_a_function_of_seed_and_epoch() -> None:
    mixer = Mixer(0.4, 1.0, (8, 6), seed=3)
    masks, shares = mixer.epoch(5, 40)
    again, shares_again = Mixer(0.4, 1.0, (8, 6), seed=3).epoch(5, 40)
    assert torch.equal(masks, again)
    assert torch.equal(shares, shares_again)
    assert not torch.equal(masks, mixer.epoch(6, 40)[0])
    assert masks.shape == (40, 8, 6)


def test_share_is_what_the_mask_keeps() -> None:
    for mixup, cutmix in ((0.4, 0.0), (0.0, 1.0), (0.4, 1.0)):
        masks, shares = Mixer(mixup, cutmix, (8, 8), seed=0).epoch(0, 60)
        torch.testing.assert_close(masks.mean((1, 2)), shares)
        assert float(shares.std()) > 0.05


def test_cutmix_masks_are_boxes_and_mixup_masks_constant() -> None:
    masks, _ = Mixer(0.0, 1.0, (9, 9), seed=1).epoch(0, 50)
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    for mask in masks:
        cut = (mask == 0).nonzero()
        if len(cut):
            height, width = (cut.max(0).values - cut.min(0).values + 1).tolist()
            assert height * width == len(cut)
    masks, _ = Mixer(1.0, 0.0, (9, 9), seed=1).epoch(0, 50)
    assert torch.equal(masks.amax((1, 2)), masks.amin((1, 2)))


def test_mix_images_against_a_loop() -> None:
    images = torch.randn(5, 3, 4, 4)
    mask = torch.rand(4, 4)
    mixed = mix_images(images, mask)
    for i in range(5):
        torch.testing.assert_close(mixed[i], mask * images[i] + (1 - mask) * images[4 - i])
    assert torch.equal(mix_images(images, torch.ones(4, 4)), images)


def test_mixed_labels_and_smoothing() -> None:
    logits, labels, share = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor(0.3)
    loss = Objective(label_smoothing=0.1)(logits, labels, torch.empty(0), share)
    hot = functional.one_hot(labels, 4).float()
    targets = 0.3 * hot + 0.7 * hot.flip(0)
    targets = 0.9 * targets + 0.1 / 4
    torch.testing.assert_close(loss, -(targets * logits.log_softmax(1)).sum(1).mean())


def test_distillation_loss() -> None:
    student, teacher = torch.randn(7, 5), torch.randn(7, 5)
    p, q = (teacher / 3).softmax(1), (student / 3).softmax(1)
    torch.testing.assert_close(distillation_loss(student, teacher, 3.0), 9 * (p * (p / q).log()).sum(1).mean())
    assert float(distillation_loss(teacher, teacher, 3.0)) < 1e-6


def test_objective_weighs_the_teacher() -> None:
    teacher = nn.Linear(3, 4).requires_grad_(False)
    images, logits, labels = torch.randn(5, 3), torch.randn(5, 4, requires_grad=True), torch.arange(5) % 4
    loss = Objective(teacher=teacher, weight=0.25, temperature=2.0)(logits, labels, images, None)
    hard = functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, 0.75 * hard + 0.25 * distillation_loss(logits, teacher(images), 2.0))
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_average_follows_its_formula() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = WeightAverage(model, decay=0.6)
    shadow = {k: v.clone() for k, v in model.state_dict().items()}
    for t in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
            model(torch.randn(4, 2))
        average.update()
        weight = max(0.4, 9 / (10 + t))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                shadow[name] = shadow[name] + weight * (value - shadow[name])
    for name, value in average.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, shadow[name])
    assert int(average.model[1].num_batches_tracked) == int(model[1].num_batches_tracked) == 20  # type: ignore[union-attr, arg-type]
    assert not average.model.training
    assert not any(p.requires_grad for p in average.model.parameters())
