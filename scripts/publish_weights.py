"""Publish a run's weights: `python scripts/publish_weights.py RUN ARCH.TAG [--data-dir DATA]`.

Stores them in fp16 under src/recnets/weights/, where `load_weights` and `create_model(..., pretrained=True)` find
them. The accuracy in the metadata is that of the fp16 file itself on the test set, not that of the run. A run that was
resumed with other commits says which of them trained which epochs.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import torch

from recnets.data import load_dataset
from recnets.experiments.ledger import read_metrics
from recnets.experiments.sessions import commits, sessions_of
from recnets.models.weights import PUBLISHED_FOLDER, SUFFIX, load_weights, save_weights
from recnets.training import RunFolder, evaluate

LOCAL_OPTIONS = ("--out", "--data-dir", "--resume")  # where something lay on the machine that trained


def portable(command: str) -> str:
    """`recnet train …` as anyone can run it: without the program's path and the folders of one machine."""
    words = shlex.split(command)
    start = words.index("train") if "train" in words else 1
    kept: list[str] = []
    skip = False
    for word in words[start:]:
        if not skip and word not in LOCAL_OPTIONS:
            kept.append(word)
        skip = word in LOCAL_OPTIONS
    return shlex.join(["recnet", *kept])


def commits_of(run: str) -> dict[str, str]:
    """`{"commits": "aa26e28ed (1–51), 28d55a188 (52–200)"}` where several made the run, else nothing."""
    folder = RunFolder(run)
    if not folder.holds_run:
        return {}
    text = commits(sessions_of(folder.read_config().get("session", []), read_metrics(folder)))
    return {"commits": text} if "," in text else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder or weights file")
    parser.add_argument("name", help="ARCH.TAG, e.g. recnet_60_480.cifar100")
    parser.add_argument("--data-dir", type=Path)
    args = parser.parse_args()
    model, metadata = load_weights(args.run)
    architecture = metadata["model"]["name"]
    if args.name.count(".") != 1 or args.name.split(".")[0] != architecture:
        raise SystemExit(f"the name must be {architecture}.TAG, got {args.name!r}")
    data = load_dataset(metadata["dataset"], data_dir=args.data_dir)
    model = model.half().float()  # what the file will hold
    normalisation = metadata["normalisation"]
    found = evaluate(model, data.test, mean=normalisation["mean"], std=normalisation["std"])
    metadata |= {
        "trained_accuracy": metadata["accuracy"],
        "accuracy": found.accuracy,
        "command": portable(metadata["command"]),
        **commits_of(args.run),
    }
    path = PUBLISHED_FOLDER / f"{args.name}{SUFFIX}"
    path.parent.mkdir(exist_ok=True)
    save_weights(path, model, metadata, dtype=torch.float16)
    trained = metadata["trained_accuracy"]
    print(f"{path.name}: {path.stat().st_size:,} bytes, {found.accuracy} % on the test set ({trained} % in training)")


if __name__ == "__main__":
    main()
