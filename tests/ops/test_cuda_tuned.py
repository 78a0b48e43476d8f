"""Plans that were measured take the place of those that are worked out."""

import json
import subprocess
import sys

import pytest
import torch

from recnets.errors import RecNetsError
from recnets.ops.cuda import grad_plan, plan, tuned
from recnets.ops.cuda.plan import Layer, Tile

from .test_cuda_kernels import check_forward_and_every_gradient

LAYER = Layer(64, 32, 32, 10, 8, 32, 3, 3)
SHAPE = {"nb": 32, "wm": 4, "wn": 2, "mt": 2, "nt": 2}
STEP = {"images": 1, "rows": 4, **SHAPE, "resident": 2, "prefetch": True, "stacked": True, "wide": False, "buffers": 1}
WIDE = {**STEP, "rows": 8, "wm": 8, "wn": 1, "nt": 4, "resident": 1, "wide": True, "buffers": 2}
GRAD = {"images": 1, "rows": 4, "groups": 5, "stages": 3, "staggered": True, "wide": False}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """`kept({"kernel": …}, …)`: these plans are in the file, until the test ends."""
    monkeypatch.setattr(tuned, "FILE", tmp_path / "tuned.json")

    def clear():
        for function in (tuned._all, plan.step, grad_plan.weight_grad):
            function.cache_clear()

    def keep(*entries):
        tuned.keep(entries, tuned.FILE)
        clear()

    clear()
    yield keep
    monkeypatch.undo()
    clear()


def entry(kernel: str, choice: dict, multiprocessors: int = 132) -> dict:
    return {**tuned.key_of(kernel, LAYER, multiprocessors), **choice}


def test_a_kept_plan_is_taken_for_its_layer_with_any_number_of_steps(kept):
    before = plan.step("forward", LAYER, 132)
    kept(entry("forward", STEP))
    for layer in (LAYER, LAYER._replace(d=3)):
        found = plan.step("forward", layer, 132)
        assert found is not None
        assert (found.tile, found.nb, found.resident, found.prefetch) == (Tile(1, 4), 32, 2, True)
        assert (found.wm, found.wn, found.mt, found.nt, found.single, found.stacked) == (4, 2, 2, 2, False, True)
        assert found.shared < before.shared
    assert plan.step("backward", LAYER, 132).tile == Tile(1, 16)
    assert plan.step("forward", LAYER, 66) != found
    assert plan.step("forward", LAYER._replace(n=65), 132).tile != Tile(1, 4)


def test_a_kept_plan_with_all_tiles_at_once_fetches_none_ahead(kept):
    kept(entry("backward", {**STEP, "rows": 16, "wm": 8, "wn": 1, "mt": 4, "nt": 4, "resident": 1}))
    found = plan.step("backward", LAYER, 132)
    assert found.single
    assert not found.prefetch
    assert found.dx_tiles == 1


def test_a_kept_plan_by_wgmma_is_for_devices_that_have_it(kept):
    before = plan.step("forward", LAYER, 132, True)
    kept(entry("forward", WIDE))
    assert plan.step("forward", LAYER, 132, True) == plan.wide_plan_of("forward", LAYER, Tile(1, 8), 2, 2, 1)
    assert plan.step("forward", LAYER, 132) == before


def test_a_kept_plan_of_the_weights_gradients(kept):
    before = grad_plan.weight_grad(LAYER, 32, 3, True)
    kept(entry("weight_grad", GRAD, 0))
    found = grad_plan.weight_grad(LAYER, 32, 3, True)
    assert (found.tile, found.groups, found.stages, found.staggered) == (Tile(1, 4), 5, 3, True)
    assert (found.ci, found.co, found.x, found.blocks) == (before.ci, before.co, before.x, before.blocks)
    assert grad_plan.weight_grad(LAYER, 32, 3, False).groups == 4


def test_a_kept_plan_that_does_not_fit_any_more_is_passed_over(kept):
    before = (
        plan.step("forward", LAYER, 132),
        plan.step("backward", LAYER, 132),
        grad_plan.weight_grad(LAYER, 32, 3, True),
    )
    kept(
        entry("forward", {**STEP, "images": 8, "rows": 32}), entry("weight_grad", {**GRAD, "rows": 32, "stages": 9}, 0)
    )
    steps = plan.step("forward", LAYER, 132), plan.step("backward", LAYER, 132)
    assert (*steps, grad_plan.weight_grad(LAYER, 32, 3, True)) == before


def _kept_layers() -> dict[tuple, dict[str, dict]]:
    """The step plans that come with the package, by layer and multiprocessors."""
    layers: dict[tuple, dict[str, dict]] = {}
    for found in json.loads(tuned.FILE.read_text()):
        if found["kernel"] != "weight_grad":
            layers.setdefault(tuple(found[name] for name in tuned.KEY[1:]), {})[found["kernel"]] = found
    return layers


@pytest.mark.parametrize("key", _kept_layers(), ids=str)
def test_the_plans_that_come_with_the_package_are_right(key, emulated, rms, monkeypatch):
    """On fewer images, with one tile a block or several as on the device that they were measured on."""
    _, h, w, si, so, kx, kh, count = key
    layer = Layer(3, h, w, 2, si, so, kx, kh)
    kept = {name: plan._tuned_step(name, Layer(*key[:3], 2, *key[3:7]), count, True) for name in _kept_layers()[key]}
    assert all(kept.values())
    emulated(64 if any(chosen.single for chosen in kept.values()) else so // min(c.nb for c in kept.values()))
    for name, chosen in kept.items():
        monkeypatch.setitem(plan.overrides, (name, layer), chosen)
    plan.step.cache_clear()
    check_forward_and_every_gradient((3, h, w, si, so, 2, kx, kh), torch.bfloat16, rms, "cpu")
    plan.step.cache_clear()


def test_a_newer_plan_takes_the_place_of_an_older_one_and_the_others_stay(kept):
    kept(entry("forward", STEP), entry("backward", STEP))
    kept(entry("forward", {**STEP, "resident": 1}))
    assert plan.step("forward", LAYER, 132).resident == 1
    assert plan.step("backward", LAYER, 132).resident == 2
    assert len(tuned.FILE.read_text().splitlines()) == 4


def test_processes_that_keep_plans_at_once_lose_none(kept):
    keep = "import json, sys; from pathlib import Path; from recnets.ops.cuda import tuned\n"
    keep += "for entry in json.loads(sys.argv[2]): tuned.keep([entry], Path(sys.argv[1]))"
    shares = [[entry("forward", STEP, share * 100 + i) for i in range(20)] for share in range(2)]
    processes = [
        subprocess.Popen([sys.executable, "-c", keep, str(tuned.FILE), json.dumps(entries)]) for entries in shares
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(json.loads(tuned.FILE.read_text())) == 40


LACKING = json.dumps([{key: value for key, value in entry("forward", STEP).items() if key != "stacked"}])


@pytest.mark.parametrize("text", ["[{]", '[{"kernel": "forward"}]', "7", LACKING])
def test_a_damaged_file_says_what_to_do(kept, text):
    tuned.FILE.write_text(text)
    with pytest.raises(RecNetsError, match=r"tuned\.json holds no plans .*; remove it"):
        plan.step("forward", LAYER, 132)
    with pytest.raises(RecNetsError, match="holds no plans"):
        tuned.keep([], tuned.FILE)
    assert tuned.FILE.read_text() == text
