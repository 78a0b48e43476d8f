"""Are this GPU's matrix products right? Plain PyTorch, nothing of ours: the products of 1×1 convolutions in bf16.

    python benchmarks/products.py
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=34 python benchmarks/products.py   # in a share of the GPU, see NOTES.md

Each is computed eagerly and, on a GPU, in a recorded graph, into memory full of NaN, and compared with float64. The
exit status is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor

# Pixels, channels in, channels out: transitions of RecNets at the last batch of an epoch, 16 images, and at 64.
SHAPES = ((1024, 640, 160), (1024, 960, 240), (1024, 1280, 320), (1024, 2560, 640), (4096, 640, 160), (65536, 160, 40))
BOUND = 1e-2


def error(actual: Tensor, exact: Tensor) -> float:
    """RMS(error)/RMS(exact)."""
    return float((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def check(shape: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """The error of each way to compute a product."""
    pixels, c_in, c_out = shape
    a = torch.randn(pixels, c_in, device=device).bfloat16()
    b = torch.randn(c_out, c_in, device=device).bfloat16()
    exact = a.double() @ b.double().t()
    out = torch.full((pixels, c_out), float("nan"), device=device, dtype=torch.bfloat16)
    torch.mm(a, b.t(), out=out)
    errors = {"eager": error(out, exact)}
    if device.type == "cuda":
        side = torch.cuda.Stream()  # what is lazily set up must be there before a recording
        with torch.cuda.stream(side):
            torch.mm(a, b.t())
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(a, b.t(), out=out)
        out.fill_(float("nan"))
        graph.replay()
        errors["recorded"] = error(out, exact)
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        print(f"{properties.name}, share {share} %: {properties.multi_processor_count} multiprocessors")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; RMS(error)/RMS(exact), bound {BOUND}")
    wrong = 0
    torch.manual_seed(0)
    for shape in SHAPES:
        errors = check(shape, device)
        bad = not all(value <= BOUND for value in errors.values())  # NaN is wrong too
        wrong += bad
        shown = ", ".join(f"{way} {value:.2e}" for way, value in errors.items())
        print(f"{' × '.join(map(str, shape)):18} {shown}{'  WRONG' if bad else ''}")
    print(f"{wrong} of {len(SHAPES)} products are wrong" if wrong else "all are right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
