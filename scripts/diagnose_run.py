"""What precision and BN do to a trained network: `python scripts/diagnose_run.py RUN [--data-dir DATA]`.

Prints the share of each CRC layer's step channels that training switched off (BN weight below 1e-2), and of how many
steps that is all of them, so that nothing of the picture passes on to the next; how far the
gradient of a batch of training images is from the one in float64, in fp32, fp16 and bf16 (autocast); and the test
accuracy as saved and with BN's running statistics computed again from batches of training images. With --draws N, N
times more, from other batches each time: as training leaves them, which is mostly those of the last few batches, and as
averages over all batches. For runs that end below expectation: what do precision and statistics cost?
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from recnets.data import Augment, EpochLoader, load_dataset
from recnets.errors import RecNetsError
from recnets.layers import CRC
from recnets.models.weights import load_weights
from recnets.training import evaluate
from recnets.training.statistics import with_new_statistics

DEAD = 1e-2
MOMENTUM = 0.1  # of BN in training: a batch counts for half after seven
LOSS_SCALE = 1024.0  # keeps small gradients within the range of fp16


def gradient(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """All gradients of the mean loss in one float64 vector; half precision by autocast."""
    half = dtype in (torch.float16, torch.bfloat16)
    model = copy.deepcopy(model).to(torch.float32 if half else dtype).train()
    with torch.autocast(images.device.type, dtype=dtype if half else torch.bfloat16, enabled=half):
        logits = model(images if half else images.to(dtype))
    (functional.cross_entropy(logits.to(torch.float32 if half else dtype), labels) * LOSS_SCALE).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in grads]) / LOSS_SCALE


def dead(model: nn.Module) -> list[tuple[int, int]]:
    """(step channels whose BN weight is nearly zero, step channels) of every CRC layer."""
    weights = [m.norm.weight for m in model.modules() if isinstance(m, CRC) and m.norm is not None]
    return [(int((weight.abs() < DEAD).sum()), len(weight)) for weight in weights]


def cut(model: nn.Module) -> tuple[int, int]:
    """(steps with all channels switched off, steps) of all CRC layers."""
    layers = [m for m in model.modules() if isinstance(m, CRC) and m.norm is not None]
    states = [layer.norm.weight.abs().view(-1, layer.s_out) for layer in layers if layer.norm is not None]
    return sum(int((state < DEAD).all(dim=1).sum()) for state in states), sum(len(state) for state in states)


def inputs_of(loader: EpochLoader, batches: int, epoch: int = 0) -> Iterator[Tensor]:
    """So many batches of training images."""
    for batch in itertools.islice(loader.epoch(epoch), batches):
        yield loader.normalise(batch.images).contiguous(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder, a weights file or a published name")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--batches", type=int, default=100, help="of training images, for the statistics")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--draws", type=int, default=0, help="statistics from other batches, so many times")
    args = parser.parse_args()
    model, metadata = load_weights(args.run)
    model = model.float().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = load_dataset(metadata["dataset"], data_dir=args.data_dir)
    norm = {key: metadata["normalisation"][key] for key in ("mean", "std")}
    loader = EpochLoader(data.train, args.batch_size, augment=Augment(), **norm)

    if counts := dead(model):
        share = sum(off for off, _ in counts) / sum(of for _, of in counts)
        layers = ", ".join(f"{100 * off / of:.0f}" for off, of in counts)
        print(f"step channels switched off: {100 * share:.0f} % (layer by layer {layers} %)", flush=True)
        print("steps that pass nothing on: {} of {}".format(*cut(model)), flush=True)
    batch = next(loader.epoch(0))
    images = loader.normalise(batch.images)
    exact = gradient(model, images, batch.labels, torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = gradient(model, images, batch.labels, dtype)
        error, cosine = (found - exact).norm() / exact.norm(), functional.cosine_similarity(found, exact, dim=0)
        print(f"gradient in {str(dtype)[6:]}: {100 * error:.1f} % off float64, cosine {cosine:.4f}", flush=True)

    print(f"accuracy as saved: {evaluate(model, data.test, **norm).accuracy:.2f} %", flush=True)
    again = evaluate(with_new_statistics(model, inputs_of(loader, args.batches)), data.test, **norm).accuracy
    print(f"accuracy with BN's statistics from {args.batches} batches: {again:.2f} %", flush=True)
    for draw in range(1, args.draws + 1):
        found = [
            evaluate(with_new_statistics(model, inputs_of(loader, args.batches, draw), momentum), data.test, **norm)
            for momentum in (MOMENTUM, None)
        ]
        left, averages = (evaluation.accuracy for evaluation in found)
        print(f"draw {draw}: as training leaves them {left:.2f} %, averages {averages:.2f} %", flush=True)


if __name__ == "__main__":
    try:
        main()
    except RecNetsError as error:
        sys.exit(f"error: {error}")
