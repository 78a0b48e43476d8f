"""Where a stage's last module pools by itself, nobody can tell but by the clock."""

import copy

import pytest
import torch
from torch import nn

from recnets import RecNet
from recnets.layers import Recurrent
from recnets.ops import dispatch

needs_triton = pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")


def tiny(**options) -> RecNet:
    return RecNet(2, (2, 3, 2), (2, 1, 2), num_classes=5, **options)


def pooled_within(model: RecNet, x: torch.Tensor, monkeypatch) -> int:
    """How many Recurrent modules were asked to pool in a pass."""
    asked = []
    forward = Recurrent.forward

    def note(self, x, pool=False, **how):
        asked.append(pool)
        return forward(self, x, pool, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Recurrent, "forward", note)
        model(x)
    return sum(asked)


def test_output_and_gradients_are_those_of_separate_modules(monkeypatch):
    within = tiny().double().train()
    apart = copy.deepcopy(within)
    apart.pool.register_forward_hook(lambda *_: None)
    x = torch.randn(3, 3, 9, 14, dtype=torch.float64)
    assert pooled_within(copy.deepcopy(within), x, monkeypatch) == 2
    assert pooled_within(copy.deepcopy(apart), x, monkeypatch) == 0
    results = []
    for model in (within, apart):
        out = model(x)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*results)


@needs_triton
def test_kernels_and_plain_pytorch_agree_in_training(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain = RecNet(2, (2, 2), (1, 1), num_classes=5, backend="torch").train()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused = copy.deepcopy(plain).to(device)
    for module in fused.modules():
        if hasattr(module, "backend"):
            module.backend = "triton"
    x = torch.randn(4, 3, 4, 5)
    expected, out = plain(x), fused(x.to(device))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    out.square().sum().backward()
    pairs = zip(fused.named_parameters(), plain.parameters(), strict=True)
    for (name, own), other in pairs:
        if name.endswith("weight_h"):
            continue  # idle with one segment
        distance = (own.grad.cpu() - other.grad).norm() / other.grad.norm().clamp_min(1e-3)
        assert distance < 1e-3, name


def test_hooks_see_every_module_and_its_own_output():
    model = tiny().train()
    seen = {}

    def note(name):
        def hook(module, args, out):
            seen[name] = tuple(out.shape[1:])

        return hook

    for name in ("stages.0", "stages.0.1", "stages.1.1.transition", "pool"):
        model.get_submodule(name).register_forward_hook(note(name))
    model(torch.randn(2, 3, 8, 12))
    assert seen == {
        "stages.0": (3, 8, 12),
        "stages.0.1": (3, 8, 12),
        "stages.1.1.transition": (4, 4, 6),
        "pool": (4, 2, 3),
    }


@pytest.mark.parametrize("name", ["stages.0", "stages.0.1", "stages.0.1.transition", "pool"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_any_hook_on_the_way_counts(name, kind, monkeypatch):
    model = tiny().train()
    handle = getattr(model.get_submodule(name), f"register_{kind}")(lambda *_: None)
    others = 0 if name == "pool" else 1
    assert pooled_within(model, torch.randn(2, 3, 4, 4), monkeypatch) == others
    handle.remove()
    assert pooled_within(model, torch.randn(2, 3, 4, 4), monkeypatch) == 2


def test_hooks_on_all_modules_count_too(monkeypatch):
    names = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    try:
        assert pooled_within(tiny().train(), torch.randn(2, 3, 4, 4), monkeypatch) == 0
    finally:
        handle.remove()
    assert names.count("MaxPool2d") == 2


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(2), nn.MaxPool2d(3, stride=2, padding=1), nn.MaxPool2d(2, ceil_mode=True)]
)
def test_another_pooling_is_used_as_it_is(pool, monkeypatch):
    model = tiny().train()
    model.pool = pool
    assert pooled_within(model, torch.randn(2, 3, 7, 7), monkeypatch) == 0


def test_evaluation_calls_the_modules_one_by_one(monkeypatch):
    assert pooled_within(tiny().eval(), torch.randn(2, 3, 8, 8), monkeypatch) == 0


def test_intermediates_are_those_before_pooling():
    model = tiny().train()
    _, maps = model.forward_intermediates(torch.randn(2, 3, 8, 8))
    assert [tuple(m.shape[1:]) for m in maps] == [(3, 8, 8), (4, 4, 4), (4, 2, 2)]


def test_compiles_as_one_graph():
    model = tiny(backend="torch").train()
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
