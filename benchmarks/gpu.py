"""Time RecNets on a GPU, fused kernels against plain PyTorch: `python benchmarks/gpu.py [--no-compile]`.

Checks the kernels first and prints no time while a check fails. All ratios are of one run: same process, same GPU,
bf16 autocast with fp32 statistics and accumulation, every step under a CUDA graph, the median of several rounds.
Writes a CSV under benchmarks/results/ whose name carries the device and the versions.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets import create_model
from recnets.ops import naive
from recnets.ops.triton import op
from recnets.utils import git_commit, versions

MODEL = "recnet_60_1280"
SHAPES = [(3, 32, 8, 32, 10), (3, 16, 16, 64, 10), (3, 8, 32, 128, 10), (2, 8, 24, 96, 30), (1, 64, 4, 16, 3)]


def rms(error: Tensor, reference: Tensor) -> float:
    return float((error.double() - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def check() -> bool:
    """Forward and every gradient against the naive loop in float64, fp32 without tf32."""
    torch.backends.cudnn.allow_tf32 = False
    good = True
    for n, size, s_in, s_out, d in SHAPES:
        generator = torch.Generator(device="cuda").manual_seed(0)
        shapes = [(n, d * s_in, size, size), (s_out, s_in, 3, 3), (s_out, s_out, 3, 3), (d * s_out,), (d * s_out,)]
        tensors = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
        tensors[1] /= (9 * s_in) ** 0.5
        tensors[2] /= (9 * s_out) ** 0.5
        fused = [t.clone().requires_grad_() for t in tensors]
        out = op.crc_train(*fused, d, 1e-5)[0]
        exact = [t.double().requires_grad_() for t in tensors]
        running = (torch.zeros_like(exact[3]).detach(), torch.ones_like(exact[3]).detach())
        norm = (*running, exact[3], exact[4])
        h = naive.crc(*exact[:3], None, norm, d=d, training=True, decisions=(out > 0).double())
        grad = torch.randn_like(h)
        h.backward(grad)
        out.backward(grad.float())
        errors = [rms(out.detach(), h.detach())]
        errors += [
            rms(a.grad, e.grad) for a, e in zip(fused, exact, strict=True) if a.grad is not None and e.grad is not None
        ]
        print(
            f"check {size}x{size} s_in {s_in} s_out {s_out} d {d}: largest relative error {max(errors):.1e}", flush=True
        )
        good &= max(errors) < 1e-5
    torch.backends.cudnn.allow_tf32 = True
    return good


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """`work` captured as a CUDA graph, to be replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(run: Callable[[], object], rounds: int = 7, target: float = 0.05) -> float:
    """Median time of one call, from rounds of about `target` seconds each."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(repeats: int) -> float:
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3 / repeats

    timed(3)
    repeats = max(3, int(target / timed(3)))
    return statistics.median(timed(repeats) for _ in range(rounds))


def training_step(model: nn.Module, batch: int) -> Callable[[], object]:
    """Forward, loss, backward and SGD step on random pictures."""
    images = torch.randn(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def inference(model: nn.Module, batch: int) -> Callable[[], object]:
    images = torch.randn(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    model = copy.deepcopy(model).eval()

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            return model(images)

    return run


def variants(compiled: bool) -> dict[str, Callable[[], nn.Module]]:
    """How a network can be run, by name."""

    def build(**overrides: object) -> nn.Module:
        torch.manual_seed(0)
        model = create_model(MODEL, num_classes=100, **overrides)
        return model.cuda().to(memory_format=torch.channels_last)

    found: dict[str, Callable[[], nn.Module]] = {
        "fused": lambda: build(backend="auto"),
        "plain": lambda: build(backend="torch"),
        "grouped control, plain": lambda: build(backend="torch", recurrent=False),
    }
    if compiled:
        found["plain, compiled"] = lambda: torch.compile(build(backend="torch"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024], help="batches of the training step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the CSV")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    if not check():
        print("a check failed: no time is printed", file=sys.stderr)
        return 1
    rows: list[dict[str, object]] = []
    jobs = [("training", batch) for batch in args.batches] + [("inference", 1024), ("inference", 1)]
    for job, batch in jobs:
        for name, build in variants(not args.no_compile).items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            model = build()
            run = graphed(training_step(model, batch) if job == "training" else inference(model, batch))
            time = seconds(run)
            memory = torch.cuda.max_memory_allocated() / 2**20
            rows.append(
                {"model": MODEL, "job": job, "batch": batch, "variant": name, "ms": round(time * 1e3, 4),
                 "images_per_second": round(batch / time), "peak_mib": round(memory)}
            )  # fmt: skip
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            del model, run
    for row in rows:  # each against the fastest plain version of the same job
        plain = [
            r for r in rows if (r["job"], r["batch"]) == (row["job"], row["batch"]) and "plain" in str(r["variant"])
        ]
        best = min(float(str(r["ms"])) for r in plain if "grouped" not in str(r["variant"]))
        row["times_best_plain"] = round(best / float(str(row["ms"])), 2)
    device = torch.cuda.get_device_name().replace(" ", "-").lower()
    found = versions()
    path = args.out / f"gpu-{device}-torch{found['torch']}-triton{found['triton']}.csv"
    args.out.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {' '.join(sys.argv)}; commit {git_commit()}\n")
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
