"""Cycles that a product of a warpgroup takes, by where its factors lie in shared memory: what `wide` plans are made of.

    python benchmarks/wgmma.py             # seconds, on a GPU of compute capability 9
    python benchmarks/wgmma.py --compile   # only compiles, without a GPU

The PTX manual lets factors begin at any 16 bytes, and their parts lie any number of these apart. Whether that costs
time it does not say: "aligned" are factors whose 8 rows of 16 bytes begin at multiples of 128. One block a
multiprocessor of one to three warpgroups, random factors, sums in flight as in the kernels. The CSV goes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from common import RESULTS, context, file_name, write_csv
from gpu import Row
from recnets.ops.cuda import kernels

SOURCE = Path(__file__).with_name("wgmma.cu")
BYTES = 96 * 1024  # of a block's factors
PRODUCTS, ROUNDS = 32, 64  # between waits, and waits
ARITHMETIC = 1 / 2  # cycles a column: 64 x 16 multiply-adds a column, 2,048 a cycle and multiprocessor
# By k or by rows, columns; a's step from product to product, leading and stride offset, then b's two offsets.
PLACES = {
    (1, 32): {"aligned": (8, 8, 16, 32, 8), "taps of 32x32": (1, 1, 34, 32, 8)},
    (1, 64): {"aligned": (8, 8, 16, 64, 8), "taps of 16x16": (1, 1, 18, 64, 8), "taps of 8x8": (1, 1, 10, 64, 8)},
    (0, 80): {"aligned": (8, 8, 16, 8, 16), "taps of 16x16": (1, 8, 17, 8, 19), "taps of 8x8": (1, 8, 9, 8, 11)},
}


def defines(by_k: int, columns: int, groups: int) -> dict[str, int]:
    return {
        "THREADS": 128 * groups, "K_MAJOR": by_k, "WIDTH": columns, "PRODUCTS": PRODUCTS, "ROUNDS": ROUNDS,
    }  # fmt: skip


def measure(by_k: int, columns: int, groups: int) -> list[Row]:
    """A row for every place."""
    kernel = kernels.kernel("timed_products", torch.bfloat16, 0, defines(by_k, columns, groups), BYTES)
    count = kernels.multiprocessors(0)
    factors = torch.randn(BYTES // 2, device="cuda").bfloat16()
    cycles = torch.zeros(count, dtype=torch.int64, device="cuda")
    rows: list[Row] = []
    for place, numbers in PLACES[by_k, columns].items():
        for _ in range(2):  # the second counts
            kernel((count, 1, 1), factors, cycles, *numbers, BYTES)
        one = cycles.double().mean().item() / (PRODUCTS * ROUNDS * groups)
        how = {"factors": "by k" if by_k else "by rows", "columns": columns, "warpgroups": groups, "place": place}
        rows.append({**how, "cycles": round(one, 1), "arithmetic": columns * ARITHMETIC})
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="only compile the kernels")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    args = parser.parse_args()
    kernels.FILES["timed_products"] = ("half.cuh", "memory.cuh", "wgmma.cuh", str(SOURCE))
    if args.compile:
        for each in PLACES:
            print(*each, kernels.resources("timed_products", torch.bfloat16, defines(*each, 1)))
        return 0
    if not torch.cuda.is_available() or not kernels.has_wgmma(0):
        print("this benchmark needs a CUDA device of compute capability 9; --compile needs none", file=sys.stderr)
        return 2
    rows = [row for each in PLACES for groups in (1, 2, 3) for row in measure(*each, groups)]
    write_csv(args.out / (file_name("wgmma", context("cuda")) + ".csv"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
