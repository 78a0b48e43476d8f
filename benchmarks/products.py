"""Are this GPU's matrix products right? Plain PyTorch, nothing of ours: 1×1 convolutions in bf16 and their gradients.

    python benchmarks/products.py
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=34 python benchmarks/products.py   # in a share of the GPU, see NOTES.md

Each is computed eagerly and, on a GPU, in a recorded graph, into memory full of NaN, and compared with float64. The
exit status is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

import torch
from torch import Tensor

# Pixels, channels in, channels out: transitions of RecNets at the last batch of an epoch, 16 images, and at 64.
SHAPES = ((1024, 640, 160), (1024, 960, 240), (1024, 1280, 320), (1024, 2560, 640), (4096, 640, 160), (65536, 160, 40))
BOUND = 1e-2


def error(actual: Tensor, exact: Tensor) -> float:
    """RMS(error)/RMS(exact), infinite where something was left unwritten."""
    found = float((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def check(shape: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """The largest error of a product and of the two of its gradients, for each way to compute them."""
    pixels, c_in, c_out = shape
    a, b, dy = (
        torch.randn(rows, columns, device=device).bfloat16()
        for rows, columns in ((pixels, c_in), (c_out, c_in), (pixels, c_out))
    )
    pairs = [(a, b.t()), (dy, b), (dy.t(), a)]
    errors: dict[str, float] = {}
    for left, right in pairs:
        exact = left.double() @ right.double()
        for way, value in computed(left, right).items():
            errors[way] = max(error(value, exact), errors.get(way, 0.0))
    return errors


def computed(left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """The product, each time into memory full of NaN."""
    results = {"eager": left.new_full((left.shape[0], right.shape[1]), float("nan"))}
    torch.mm(left, right, out=results["eager"])
    if left.device.type == "cuda":
        side = torch.cuda.Stream()  # what is lazily set up must be there before a recording
        with torch.cuda.stream(side):
            torch.mm(left, right)
        side.synchronize()
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(results["eager"])
        with torch.cuda.graph(graph):
            torch.mm(left, right, out=out)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        results["recorded"] = out
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        torch.cuda.set_device(device if device.index is not None else 0)
        properties = torch.cuda.get_device_properties(device)
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        print(f"{properties.name}, share {share} %: {properties.multi_processor_count} multiprocessors")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; RMS(error)/RMS(exact), bound {BOUND}")
    wrong = 0
    torch.manual_seed(0)
    for shape in SHAPES:
        errors = check(shape, device)
        bad = any(value > BOUND for value in errors.values())
        wrong += bad
        shown = ", ".join(f"{way} {value:.2e}" for way, value in errors.items())
        print(f"{' × '.join(map(str, shape)):18} {shown}{'  WRONG' if bad else ''}")
    print(f"{wrong} of {len(SHAPES)} shapes are wrong" if wrong else "all are right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
