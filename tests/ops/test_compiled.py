"""All GPU code through its real compilers, without a GPU: NVRTC for CUDA C++, Triton's for NVIDIA and AMD."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recnets import create_model, list_models
from recnets.layers import Recurrent
from recnets.ops.cuda import crc, grad_plan, inference, norm_relu, nvrtc
from recnets.ops.cuda.inference import EvalNorm
from recnets.ops.cuda.plan import Layer, Plan, Tile, overrides, step, wide_plan_of

from .compiled import Compiler, available
from .test_cuda_wide import wide_plans

# Where there is a GPU the kernels run, which shows more.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
MODELS = [name for name in list_models("recnet_*") if "." not in name]
SIDES = (32, 32, 16, 16, 8, 8)
A_FEW = 64  # bytes: some registers more or less at the end of a kernel; thousands would be in its loops
META = torch.device("meta")


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    """Until the test ends CUDA kernels are compiled, not run, for tensors of the meta device."""
    if not available():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    device = Compiler()
    device.replace_the_device(monkeypatch)
    return device


def train_layer(layer: Layer, *, batch: bool = True, relu: bool = True) -> None:
    """All launches of a CRC layer in training."""
    count, channels = (layer.d * layer.n, layer.si) if layer.apart else (layer.n, layer.d * layer.si)
    x = torch.empty(count, layer.h, layer.w, channels, dtype=torch.bfloat16, device=META)
    sizes = ((layer.si, layer.kx), (layer.so, layer.kh))
    weights = [torch.empty(layer.so, s, k, k, device=META) for s, k in sizes]
    norm = [torch.empty(layer.d * layer.so, device=META) for _ in range(2)]
    known = None if batch else torch.empty(2, layer.d, layer.so, device=META)
    h, z, sums = crc.forward(x, *weights, *norm, known, layer=layer, eps=1e-5, relu=relu)
    tensors = (h, x, h, z, sums, *weights, *norm)
    crc.backward(*tensors, layer=layer, eps=1e-5, batch=batch, relu=relu)


def modules_of(name: str) -> list[tuple[Recurrent, int, bool]]:
    """The Recurrent modules of a network of 32×32 pictures: side of the map, and is it pooled?"""
    with META:
        modules = [m for m in create_model(name).modules() if isinstance(m, Recurrent)]
    return list(zip(modules, SIDES, (False, True, False, True, False, False), strict=True))


def layers_of(name: str, batch: int) -> set[Layer]:
    return {Layer(batch, side, side, m.crc.d, m.crc.s_in, m.crc.s_out, 3, 3) for m, side, _ in modules_of(name)}


def assert_nothing_spills(compiler: Compiler) -> None:
    spilled = {key: taken.spilled for key, taken in compiler.taken.items() if taken.spilled > A_FEW}
    assert not spilled


def assert_products_overlap(logs: list[str]) -> None:
    """The compiler says so where each product of a warpgroup waits for the one before, or where it adds a fence.

    It adds one, and a product besides, for what is committed in another place than where the products are.
    """
    assert logs
    assert not [log for log in logs if "serialized" in log or "injected" in log]


# Plans do not depend on the number of steps.
LAYERS = sorted({layer._replace(d=3) for name in MODELS for layer in layers_of(name, 64)})


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.h}x{layer.w} {layer.si} to {layer.so}")
def test_training_of_every_named_model(layer, compiler):
    train_layer(layer)
    launched = {name.removesuffix("_wide") for name in compiler.launched}
    assert launched >= {"pack", "forward", "backward", "weight_grad", "add_parts"}
    assert_nothing_spills(compiler)


@pytest.mark.parametrize("batch", [16, 1024])
@pytest.mark.parametrize("name", ["recnet_60_1280", "recnet_30_60"])
def test_training_with_other_batches(name, batch, compiler):
    for layer in layers_of(name, batch):
        train_layer(layer)
    assert_nothing_spills(compiler)


@pytest.mark.parametrize("batch", [64, 1024])
def test_segments_apart(batch, compiler):
    for layer in layers_of("recnet_60_1280", batch):
        train_layer(layer._replace(apart=True))
    assert_nothing_spills(compiler)


@pytest.mark.parametrize(("batch", "relu"), [(True, False), (False, True), (False, False)])
def test_known_statistics_and_linear_recursion(batch, relu, compiler):
    for layer in layers_of("recnet_60_1280", 64):
        train_layer(layer, batch=batch, relu=relu)
    assert_nothing_spills(compiler)


@pytest.mark.parametrize("kernels", [(1, 3), (3, 1), (1, 1)])
def test_other_kernel_sizes(kernels, compiler):
    for layer in layers_of("recnet_60_1280", 64):
        train_layer(layer._replace(kx=kernels[0], kh=kernels[1]))
    assert "input_grad" in compiler.launched or kernels[0] == kernels[1]
    assert_nothing_spills(compiler)


WIDE = [layer for layer in LAYERS if wide_plans(layer)]


@pytest.fixture
def logs(monkeypatch) -> list[str]:
    """What the compiler says until the test ends."""
    found, compiled = [], nvrtc._compile

    def compile_and_note(*args):
        binary, log = compiled(*args)
        found.append(log)
        return binary, log

    monkeypatch.setattr(nvrtc, "_compile", compile_and_note)
    return found


@pytest.mark.parametrize("layer", WIDE, ids=lambda layer: f"{layer.h}x{layer.w} {layer.si} to {layer.so}")
def test_weight_gradients_by_wgmma(layer, compiler, logs, monkeypatch):
    x, h, dz = (
        torch.empty(layer.n, layer.h, layer.w, layer.d * s, dtype=torch.bfloat16, device=META)
        for s in (layer.si, layer.so, layer.so)
    )
    for each in wide_plans(layer):
        monkeypatch.setitem(grad_plan.grad_overrides, (layer, layer.so, True), each)
        grad_plan.weight_grad.cache_clear()
        crc.weight_grads(x, h, dz, layer)
    grad_plan.weight_grad.cache_clear()
    assert set(compiler.launched) == {"weight_grad_wide"}
    assert not any(taken.spilled for taken in compiler.taken.values())
    assert_products_overlap(logs)


def wide_step_plan(name: str, layer: Layer) -> Plan | None:
    """The first of these that fits."""
    cuts = [(2, 2), (1, 2), (2, 1), (1, 1)]
    plans = [wide_plan_of(name, layer, Tile(1, 8), groups, buffers, 1) for groups, buffers in cuts]
    return next((each for each in plans if each is not None), None)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.h}x{layer.w} {layer.si} to {layer.so}")
def test_steps_by_wgmma(layer, compiler, logs, monkeypatch):
    plans = {name: wide_step_plan(name, layer) for name in ("forward", "backward")}
    assert plans["forward"]
    assert plans["backward"] or layer.so == 96  # the only one that is too large
    for name, chosen in plans.items():
        if chosen:
            monkeypatch.setitem(overrides, (name, layer), chosen)
    step.cache_clear()
    train_layer(layer)
    step.cache_clear()
    assert {f"{name}_wide" for name, chosen in plans.items() if chosen} <= set(compiler.launched)
    assert_nothing_spills(compiler)
    assert_products_overlap(logs)


@pytest.mark.parametrize("batch", [1, 1024])
@pytest.mark.parametrize("name", ["recnet_60_1280", "recnet_120_2880"])
def test_evaluation(name, batch, compiler):
    for module, side, pool in modules_of(name):
        layer, matrix = module.crc, module.transition.conv.weight.flatten(1)
        rows = torch.empty(batch, side, side, layer.d * layer.s_in, dtype=torch.bfloat16, device=META)
        both = (layer.norm, module.transition.norm)
        norms = [EvalNorm(n.weight, n.bias, n.running_mean, n.running_var, n.eps) for n in both]
        inference.run(rows, layer.weight_x, layer.weight_h, matrix, *norms, layer.d, pool=pool)
    assert {"prepare", "inference"} <= set(compiler.launched)
    assert_nothing_spills(compiler)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", [(64, 32, 32, 80), (1024, 16, 16, 320), (64, 8, 8, 720)], ids=str)
def test_norms_of_maps(shape, pool, compiler):
    y = torch.empty(shape, dtype=torch.bfloat16, device=META)
    gamma, beta = torch.empty(2, shape[3], device=META)
    for segments in (1, 10):
        out, sums = norm_relu.forward(y, gamma, beta, 1e-5, pool, segments)
        norm_relu.backward(out, y, sums, gamma, beta, 1e-5, pool, segments)
    assert compiler.launched == ["norm_relu_forward", "norm_relu_backward"] * 2
    assert_nothing_spills(compiler)


# Compute capability or name, and bytes of shared memory that a program may take there.
TARGETS = {"H200": ("cuda", "90", 227), "A100": ("cuda", "80", 163), "MI300": ("hip", "gfx942", 64)}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", TARGETS)
def test_triton_kernels_compile_and_fit(gpu, tmp_path):
    pytest.importorskip("triton")
    backend, arch, kilobytes = TARGETS[gpu]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    worker = Path(__file__).with_name("compile_worker.py")
    command = [sys.executable, str(worker), backend, arch, str(kilobytes * 1024)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not found["missing"]
    too_large = {name: size for name, size in found["shared"].items() if size > kilobytes * 1024}
    assert not too_large
