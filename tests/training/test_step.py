from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from recnets.data import DataSet, Normalise
from recnets.models import create_model
from recnets.training.ema import WeightAverage
from recnets.training.objective import Objective
from recnets.training.step import TrainStep, make_optimizer, momentum_buffers, preserved

CPU = torch.device("cpu")


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return create_model("RecNet(2, 2, 2, 2, 2)", num_classes=4)


def make_step(model: nn.Module, data: DataSet, device: torch.device = CPU, **settings: object) -> TrainStep:
    optimizer = make_optimizer(
        model, lr=0.1, momentum=0.9, nesterov=True, dampening=0.0, weight_decay=5e-4, decay="all", device=device
    )
    normalise = Normalise(data.mean, data.std, device)
    return TrainStep(model, optimizer, Objective(), normalise, device=device, **settings)  # type: ignore[arg-type]


def test_steps_are_plain_sgd(stripes_data: DataSet) -> None:
    """The same weights as the loop that everyone writes, with torch's own SGD from its first step."""
    model = tiny()
    reference = copy.deepcopy(model)
    step = make_step(model, stripes_data)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    normalise = Normalise(stripes_data.mean, stripes_data.std)
    total, hits = 0.0, 0
    for i in range(6):
        images, labels = stripes_data.train.images[i * 8 : i * 8 + 8], stripes_data.train.labels[i * 8 : i * 8 + 8]
        rate = 0.1 / (i + 1)
        step.set_lr(rate)
        step(images, labels, 8)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = reference(normalise(images))
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        total, hits = total + loss.item() * 8, hits + int((logits.argmax(1) == labels).sum())
    for ours, theirs in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert float(step.meter.loss) == pytest.approx(total, rel=1e-5)
    assert [int(v) for v in (step.meter.hits, step.meter.images, step.meter.steps)] == [hits, 48, 6]


def test_first_bad_step_is_remembered(stripes_data: DataSet) -> None:
    step = make_step(tiny(), stripes_data)
    images, labels = stripes_data.train.images[:8], stripes_data.train.labels[:8]
    step(images, labels, 8)
    assert int(step.meter.first_bad) == -1
    with torch.no_grad():
        next(step.model.parameters()).fill_(float("nan"))
    for _ in range(3):
        step(images, labels, 8)
    assert int(step.meter.first_bad) == 1
    step.meter.reset()
    assert [float(t) for t in step.meter.tensors()] == [0, 0, 0, 0, -1]


def test_preserved_leaves_no_trace(stripes_data: DataSet) -> None:
    """What a capture relies on: warm-up steps change nothing, not even a random state."""
    model = tiny()
    step = make_step(model, stripes_data, average=WeightAverage(model, 0.9))
    images, labels = stripes_data.train.images[:8], stripes_data.train.labels[:8]
    step(images, labels, 8)
    before = [t.clone() for t in step.mutable_tensors()]
    random = torch.get_rng_state()
    with preserved(step.mutable_tensors(), CPU):
        step(images, labels, 8)
        torch.rand(3)
        changed = sum(not torch.equal(a, b) for a, b in zip(before, step.mutable_tensors(), strict=True))
        assert changed > len(before) // 2
    assert all(torch.equal(a, b) for a, b in zip(before, step.mutable_tensors(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_shards_of_unequal_size_add_up(stripes_data: DataSet) -> None:
    """The mean over processes of their gradients is the gradient of the global batch."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    images, labels = stripes_data.train.images[:7], stripes_data.train.labels[:7]

    def change(part: slice, world: int) -> torch.Tensor:
        model = copy.deepcopy(linear)
        make_step(model, stripes_data, world=world)(images[part], labels[part], 7)
        return model[1].weight.detach() - linear[1].weight.detach()  # type: ignore[operator, union-attr]

    whole = change(slice(0, 7), 1)
    parts = (change(slice(0, 4), 2) + change(slice(4, 7), 2)) / 2
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_decay_of_weights_only() -> None:
    model = tiny()
    optimizer = make_optimizer(
        model, lr=0.1, momentum=0.9, nesterov=True, dampening=0.0, weight_decay=0.01, decay="weights", device=CPU
    )
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.01
    assert plain["weight_decay"] == 0
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_fp16_scales_the_loss_and_leaves_out_steps_that_overflow(stripes_data: DataSet) -> None:
    images, labels = stripes_data.train.images[:16], stripes_data.train.labels[:16]
    changes = []
    for scale in (2.0**16, 2.0**8):
        step = make_step(tiny(), stripes_data, precision="fp16")
        assert step.scaler.get_scale() == 2.0**16
        step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": scale})
        before = [p.detach().clone() for p in step.model.parameters()]
        step(images, labels, 16)
        changes.append(torch.cat([(p - b).flatten() for p, b in zip(step.model.parameters(), before, strict=True)]))
    assert 0 < (changes[0] - changes[1]).norm() < 0.02 * changes[0].norm()
    trained = [t.clone() for t in (*step.model.parameters(), *momentum_buffers(step.optimizer))]
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 1e30})
    step(images, labels, 16)
    now = (*step.model.parameters(), *momentum_buffers(step.optimizer))
    assert all(torch.equal(a, b) for a, b in zip(trained, now, strict=True))
    assert step.scaler.get_scale() == pytest.approx(5e29)
    assert int(step.meter.first_bad) == -1  # the loss itself is a number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_graph_is_the_eager_step(stripes_data: DataSet, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes, the average on: the recorded steps give the eager ones' weights."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as training does where it says fp32
    device = torch.device("cuda")
    results, scales = [], []
    for graph in (False, True):
        model = tiny().to(device)
        average = WeightAverage(model, 0.9)
        step = make_step(model, stripes_data, device, graph=graph, average=average, precision=precision)
        images, labels = stripes_data.train.images.to(device), stripes_data.train.labels.to(device)
        for i, size in enumerate((16, 16, 6, 16, 6, 16)):
            step.set_lr(0.1 / (i + 1))
            step(images[i : i + size], labels[i : i + size], size)
        results.append([t.clone() for t in step.mutable_tensors()] + momentum_buffers(step.optimizer))
        scales.append(step.scaler.state_dict())
    assert scales[0] == scales[1]
    for eager, recorded in zip(*results, strict=True):
        torch.testing.assert_close(recorded, eager, rtol=1e-3, atol=1e-4)
