"""Run every kernel on small shapes under compute-sanitizer, and keep its log.

    python benchmarks/sanitize.py                                    # memcheck and racecheck
    python benchmarks/sanitize.py --sanitizer /usr/local/cuda/bin/compute-sanitizer --tools memcheck
    python benchmarks/sanitize.py --drive --backend triton           # the shapes alone, without the tool

Shapes are odd, so that no tile is full. Every output is compared with the naive loop, which runs on the CPU, where no
tool slows it down. The log, benchmarks/results/sanitizer-….txt, has what each tool printed; the exit status is 1 where
one found an error.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from common import RESULTS, context, file_name, origin
from recnets.layers import CRC, Recurrent
from recnets.layers.crc import NONLINEARITIES
from recnets.ops import dispatch, naive
from recnets.ops.norm import Norm
from recnets.utils import atomic_write

Shape: TypeAlias = tuple[int, ...]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# N, H, W, s_in, s_out, d, kernel_x, kernel_h
SHAPES: list[Shape] = [
    (2, 5, 7, 4, 16, 3, 3, 3),
    (1, 8, 8, 8, 32, 2, 3, 3),
    (3, 5, 4, 12, 48, 3, 3, 1),
    (2, 9, 6, 16, 64, 2, 1, 3),
    (1, 4, 6, 32, 128, 2, 3, 3),
    (1100, 4, 4, 4, 16, 2, 3, 3),  # more tiles than multiprocessors
]
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def error(actual: Tensor, expected: Tensor) -> float:
    """RMS(error)/RMS(reference)."""
    return float((actual.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def drive_crc(shape: Shape, dtype: torch.dtype, device: str, backend: str, nonlinearity: str) -> float:
    """A CRC layer forward, backward and in evaluation; the larger error of its two outputs."""
    n, height, width, s_in, s_out, d, kernel_x, kernel_h = shape
    kernels = {"kernel_x": kernel_x, "kernel_h": kernel_h}
    layer = CRC(s_in, s_out, d, nonlinearity=nonlinearity, backend=backend, **kernels).to(device)
    x = torch.randn(n, d * s_in, height, width).to(dtype)
    errors = []
    for training in (True, False):
        exact = {k: t.double().cpu().clone() for k, t in layer.train(training).state_dict().items()}
        names = ("running_mean", "running_var", "weight", "bias") if layer.norm is not None else ()
        norm = tuple(exact[f"norm.{name}"] for name in names) or None
        weights = (exact["weight_x"], exact["weight_h"], exact.get("bias"))
        expected = naive.crc(x.double(), *weights, norm, d=d, nonlinearity=nonlinearity, training=training)
        with torch.set_grad_enabled(training):
            inputs = x.to(device).clone().requires_grad_(training)
            h = layer(inputs)
        if training:
            h.backward(torch.ones_like(h))
            finite = [t.grad.isfinite().all() for t in (inputs, *layer.parameters()) if t.grad is not None]
            assert all(finite), "a gradient is not finite"
        errors.append(error(h.detach(), expected))
    return max(errors)


def drive_norm(shape: Shape, dtype: torch.dtype, device: str, backend: str, pool: bool) -> float:
    """BN and ReLU of a map, with and without pooling, forward and backward; the error of its output."""
    n, height, width, _, channels, *_ = shape
    y = torch.randn(n, channels, height, width).to(dtype)
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    functional = torch.nn.functional
    expected = torch.relu(functional.batch_norm(y.double(), None, None, weight.double(), bias.double(), True))
    expected = functional.max_pool2d(expected, 2) if pool else expected
    leaves = [t.to(device).clone().requires_grad_() for t in (y, weight, bias)]
    statistics = [torch.zeros(channels, device=device), torch.ones(channels, device=device)]
    norm = Norm(statistics[0], statistics[1], leaves[1], leaves[2], True, 0.1, 1e-5)
    out = dispatch.norm_relu(leaves[0], norm, backend=backend, pool=pool)
    out.backward(torch.ones_like(out))
    return error(out.detach(), expected)


def drive_recurrent(shape: Shape, dtype: torch.dtype, device: str, backend: str) -> float:
    """A Recurrent module in evaluation, with pooling; the error of its output."""
    n, height, width, s_in, s_out, d, kernel_x, kernel_h = shape
    options = {"kernel_x": kernel_x, "kernel_h": kernel_h}
    module = Recurrent(s_in, s_out, 2 * s_out, d, backend=backend, **options).to(device).eval()
    exact = Recurrent(s_in, s_out, 2 * s_out, d, backend="torch", **options).eval()
    exact.load_state_dict(module.state_dict())
    x = torch.randn(n, d * s_in, height, width).to(dtype)
    with torch.no_grad():
        half = dtype != torch.float32
        with torch.autocast(device, dtype=dtype, enabled=half and device == "cuda"):
            out = module(x.to(device) if half and device == "cuda" else x.float().to(device), pool=True)
        return error(out, exact.double()(x.double(), pool=True))


def drive(backend: str, device: str, shapes: Sequence[Shape]) -> int:
    """All kernels on all shapes; 1 where an output is wrong."""
    torch.backends.cudnn.allow_tf32 = False
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's bf16 is wrong
    status = 0
    for shape, dtype, deterministic in itertools.product(shapes, (torch.float32, half), (False, True)):
        if deterministic and shape != shapes[0]:
            continue  # the kernels differ only in how they add sums
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(deterministic)
        others = NONLINEARITIES if shape == shapes[0] else ("separate_bn_relu",)
        errors = [drive_crc(shape, dtype, device, backend, nonlinearity) for nonlinearity in others]
        errors += [drive_recurrent(shape, dtype, device, backend)]
        errors += [drive_norm(shape, dtype, device, backend, pool) for pool in (False, True)]
        if device == "cuda":
            torch.cuda.synchronize()
        good = max(errors) < BOUNDS[dtype]
        status |= not good
        print(
            f"{'ok' if good else 'WRONG'}: {shape} {str(dtype).removeprefix('torch.')}"
            f"{' deterministic' if deterministic else ''}, relative errors {', '.join(f'{e:.1e}' for e in errors)}",
            flush=True,
        )
    return int(status)


def run(command: list[str]) -> tuple[int, str]:
    """A command's status and all that it printed, which is also shown as it comes."""
    # One allocation a tensor: inside a cached block, an access past a tensor's end would go unnoticed.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--backend", default="triton", help="the kernels to run")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many shapes")
    parser.add_argument("--drive", action="store_true", help="run the kernels here, without the tool")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu with TRITON_INTERPRET=1")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the log")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.drive:
        return drive(args.backend, args.device, SHAPES[: args.shapes])
    sanitizer = shutil.which(args.sanitizer)
    if sanitizer is None:
        print(
            f"{args.sanitizer!r} is no program here; name it with --sanitizer. CUDA's toolkit has it in its folder "
            "bin, and so has the package nvidia-cuda-sanitizer-api (pip install, then nvidia/cu13/bin)",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print("compute-sanitizer needs a CUDA device; without one, use --drive --device cpu", file=sys.stderr)
        return 2
    driver = [sys.executable, __file__, "--drive", "--backend", args.backend, "--shapes", str(args.shapes)]
    tool = [sanitizer, "--target-processes", "application-only", "--report-api-errors", "no", "--error-exitcode", "9"]
    _, version = run([sanitizer, "--version"])
    log = [origin(f"{torch.cuda.get_device_name()}, {context('cuda')}"), version]
    # First without a tool: it compiles the kernels, which are then read from Triton's cache.
    jobs = {"no tool": driver} | {name: [*tool, "--tool", name, *driver] for name in args.tools}
    failed = []
    for name, command in jobs.items():
        began = time.monotonic()
        status, text = run(command)
        failed += [name] if status else []
        log.append(f"== {name}: exit status {status} after {time.monotonic() - began:.0f} s\n{text}")
        path = args.out / (file_name("sanitizer", args.backend, context("cuda")) + ".txt")
        args.out.mkdir(parents=True, exist_ok=True)
        atomic_write(path, "\n".join(log))  # after each: a later tool may outlast the session
    print(f"{'errors under ' + ', '.join(failed) if failed else 'no errors'}; log in {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
