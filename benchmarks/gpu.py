"""Time RecNets on a GPU, fused kernels against plain PyTorch.

    python benchmarks/gpu.py                                         # all; compiling takes many minutes
    python benchmarks/gpu.py --only training --batches 64            # one job with all its rivals
    python benchmarks/gpu.py --only training --batches 64 --variants fused --profile

Checks the kernels first and prints no time while a check fails. All ratios are of one run: same process, same GPU,
bf16 autocast with fp32 statistics and accumulation, every step under a CUDA graph, the median of several rounds. The
CSV under benchmarks/results/, whose name carries what was run, the device and the versions, is written after every
row; a variant that fails has its reason there, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checks import check
from common import RESULTS, context, file_name, write_csv
from recnets import create_model
from recnets.layers.crc import NONLINEARITIES
from recnets.models.plain import as_plain_modules
from recnets.ops import dispatch

Row = dict[str, Any]
PAPERS = "separate_bn_relu"
BATCHES = {"training": [64, 256, 1024], "inference": [1024, 64, 1]}
PROFILED = 64
FUSED, CONTROL, COMPILED = "fused", "grouped control", ", compiled"
APART = f"{FUSED}, segments apart"  # in training only
PLAIN = ("plain", "plain modules", f"plain{COMPILED}", f"plain modules{COMPILED}")
VARIANTS = (FUSED, APART, *PLAIN[:2], CONTROL, *PLAIN[2:], f"{CONTROL}{COMPILED}")


def variants_of(nonlinearity: str) -> list[str]:
    """Those that there are: only the paper's recurrence is written in plain modules."""
    return [v for v in VARIANTS if nonlinearity == PAPERS or not v.startswith("plain modules")]


def build(model: str, variant: str, training: bool, nonlinearity: str) -> nn.Module:
    """The network, the way that `variant` names."""
    torch.manual_seed(0)
    overrides: dict[str, Any] = {"nonlinearity": nonlinearity}
    if variant.startswith(CONTROL):
        overrides["recurrent"] = False
    backend = "auto" if variant in (FUSED, APART) else "torch"
    network = create_model(model, num_classes=100, backend=backend, **overrides)
    if variant.startswith("plain modules"):
        network = as_plain_modules(network)
    network = network.cuda().to(memory_format=torch.channels_last).train(training)  # type: ignore[call-overload]
    if variant.endswith(COMPILED):
        torch._dynamo.reset()  # else another batch size than before would be compiled for any size
        return torch.compile(network, fullgraph=True, dynamic=False)  # type: ignore[return-value]
    return network


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

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            return model(images)

    return run


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """`work` captured as a CUDA graph, to be replayed. Peak memory is then that of the captured call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiling and choosing among algorithms happen here
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
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


def prepare(model: str, job: str, batch: int, variant: str, nonlinearity: str) -> Callable[[], None]:
    """One step or forward pass as a graph."""
    dispatch.APART = variant == APART
    network = build(model, variant, job == "training", nonlinearity)
    return graphed(training_step(network, batch) if job == "training" else inference(network, batch))


def measure(model: str, job: str, batch: int, variant: str, nonlinearity: str) -> Row:
    """Time and peak memory of one variant."""
    gc.collect()  # graphs and networks of earlier variants
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = prepare(model, job, batch, variant, nonlinearity)
    memory = torch.cuda.max_memory_allocated() - before
    time = seconds(run)
    return {
        "ms": round(time * 1e3, 4),
        "images_per_second": round(batch / time),
        "peak_mib": round(memory / 2**20),
    }


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Each against the fastest plain version of the same job, and its memory against the least of a plain version."""
    rows = [dict(row) for row in rows]
    for row in rows:
        rivals = [r for r in rows if (r["job"], r["batch"]) == (row["job"], row["batch"]) and r["variant"] in PLAIN]
        rivals = [r for r in rivals if not r["error"]]
        if rivals and not row["error"]:
            row["times_best_plain"] = round(min(r["ms"] for r in rivals) / row["ms"], 2)
            row["memory_of_least_plain"] = round(row["peak_mib"] / min(r["peak_mib"] for r in rivals), 2)
    return rows


COLUMNS = ("ms", "images_per_second", "peak_mib", "times_best_plain", "memory_of_least_plain", "error")


def collect(
    labels: Iterable[Mapping[str, Any]], measured: Callable[..., Row], write: Callable[[list[Row]], object]
) -> list[Row]:
    """A row for each of `labels`, printed and written as soon as it is there; a failure is a row with its reason."""
    rows: list[Row] = []
    for label in labels:
        row: Row = {**label, **dict.fromkeys(COLUMNS, "")}
        try:
            row |= measured(**label)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            row["error"] = f"{type(error).__name__}: {reason[0][:200]}"
        rows.append(row)
        shown = with_ratios(rows)
        print(", ".join(f"{key} {value}" for key, value in shown[-1].items() if value != ""), flush=True)
        write(shown)
    return with_ratios(rows)


def profile(run: Callable[[], None], steps: int = 20) -> list[Row]:
    """Time by kernel over replays of a graph, the largest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    run()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            times[event.name].append(event.time_range.elapsed_us())
    total = sum(map(sum, times.values()))
    return [
        {
            "us_a_step": round(sum(each) / steps, 2),
            "launches": round(len(each) / steps, 2),
            "us_a_launch": round(sum(each) / len(each), 2),
            "percent": round(100 * sum(each) / total, 1),
            "kernel": name,
        }
        for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]


def show_profile(model: str, job: str, batch: int, nonlinearity: str, out: Path, top: int = 25) -> None:
    """Print and write where the time of the fused variant goes."""
    run = prepare(model, job, batch, FUSED, nonlinearity)
    whole = seconds(run) * 1e6
    rows = profile(run)
    total = sum(row["us_a_step"] for row in rows)
    note = (
        f"{model}, {job}, batch {batch}: {whole:.0f} µs a step, kernels {total:.0f} µs "
        "(more than the step where launches overlap)"
    )
    print(note)
    for row in rows[:top]:
        print("{us_a_step:9.1f} µs {percent:5.1f} % {launches:6.1f} x {us_a_launch:8.2f} µs  ".format(**row), end="")
        print(str(row["kernel"])[:90])
    kind = [] if nonlinearity == PAPERS else [nonlinearity]
    path = out / (file_name("profile", model, *kind, job, str(batch), context("cuda")) + ".csv")
    write_csv(path, rows, note)
    print(path, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recnet_60_1280")
    parser.add_argument("--nonlinearity", choices=NONLINEARITIES, default=PAPERS, help="of the recurrence")
    parser.add_argument("--only", choices=BATCHES, help="training or inference alone")
    parser.add_argument("--batches", type=int, nargs="+", help="by default 64 256 1024, and for inference 1024 64 1")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all that there are by default")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    parser.add_argument("--profile", action="store_true", help=f"also time by kernel, at batch {PROFILED}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    if not dispatch.AVAILABLE:
        print(
            "without the package 'triton' there are no kernels to time: pip install 'recnets[triton]'", file=sys.stderr
        )
        return 2
    if not check(args.nonlinearity):
        print("a check failed: no time is printed", file=sys.stderr)
        return 1
    torch.backends.cudnn.benchmark = True  # shapes are fixed
    jobs = [args.only] if args.only else list(BATCHES)
    possible = variants_of(args.nonlinearity)
    variants = [v for v in args.variants or possible if not (args.no_compile and v.endswith(COMPILED))]
    labels = [
        {"model": args.model, "job": job, "batch": batch, "variant": variant}
        for job in jobs
        for batch in args.batches or BATCHES[job]
        for variant in variants
        if job == "training" or variant != APART
    ]
    words = ["" if args.nonlinearity == PAPERS else args.nonlinearity, args.only or "", *map(str, args.batches or [])]
    words += [] if len(variants) == len(possible) else ["part"]
    path = args.out / (file_name("gpu", args.model, *filter(None, words), context("cuda")) + ".csv")
    measured = functools.partial(measure, nonlinearity=args.nonlinearity)
    rows = collect(labels, measured, lambda rows: write_csv(path, rows))
    print(path)
    status = int(any(row["error"] for row in rows))
    if args.profile:
        for job in jobs:
            batches = args.batches or BATCHES[job]
            batch = PROFILED if PROFILED in batches else batches[0]
            show_profile(args.model, job, batch, args.nonlinearity, args.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
