"""Timing the plans of the CUDA kernels, as far as that goes without a GPU."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from recnets.ops.cuda import grad_plan, nvrtc, plan

from .scripts import FOLDER, run

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are in the repository only")
LAYER = plan.Layer(64, 32, 32, 10, 8, 32, 3, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_plans_are_timed_on_a_gpu_and_counted_anywhere():
    done = run("plans.py")
    assert done.returncode == 2
    assert done.stderr.strip() == "this benchmark needs a CUDA device; without one, --list counts the plans"
    done = run("plans.py", "--list", "--kernels", "forward")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^forward, Layer\(n=64, h=32, .*\): (\d+) plans$", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("batch", [64, 1024])
@pytest.mark.parametrize("name", ["forward", "backward", "weight_grad"])
def test_plans_to_time_fit_the_device_and_start_with_the_chosen_one(script, name, batch):
    plans = script("candidates")
    layers = plans.layers_of("recnet_60_1280", batch)
    assert list(layers.values()) == [2, 2, 2]
    for layer in layers:
        found = plans.plans_of(name, layer, 132)
        assert len(set(found)) == len(found) > 5
        if name == "weight_grad":
            assert found[0] == grad_plan.weight_grad(layer, layer.so, layer.kh, True, plans.has_wgmma())
            assert any(each.wide for each in found)
            assert len({tuple(plans.describe(layer, each).values()) for each in found}) == len(found)
            continue
        assert found[0] == plan.step(name, layer, 132, plans.has_wgmma())
        assert any(each.wide for each in found)
        for each in found:
            assert each.resident * (each.shared + 1024) <= 228 * 1024
            assert each.wm * each.mt * 16 >= each.tile.pixels(layer)
            assert each.wn * each.nt * 8 == each.nb
            blocks = each.tile.count(layer) * (layer.so // each.nb)
            assert each.single == (not each.wide and blocks <= each.resident * 132)
            assert not (each.single and each.prefetch)
        fewer = plans.plans_of(name, layer, 132, wide=True)
        assert fewer == [found[0], *(each for each in found[1:] if each.wide)]


def test_the_chosen_plans_are_back_after_timing(script):
    plans = script("candidates")
    chosen, other, *_ = plans.step_plans("forward", LAYER, 132)
    plans.use("forward", LAYER, other)
    assert plan.step("forward", LAYER, 132) == other
    plans.use("forward", LAYER, None)
    assert plan.step("forward", LAYER, 132) == chosen


class Ended(Exception):
    """In place of the end of the process."""


@pytest.fixture
def measured(script, monkeypatch):
    """`measured(answers, journal)`: (rows, timings) of plans of which this is known: registers, spills, result, time.

    `faulty`: an error leaves the device of no use.
    """
    plans = script("plans")

    def measure(answers, journal, *, faulty=False):
        timed = []

        def kernel(name, dtype, index, defines, shared):
            (found,) = (each for each in answers if plans.defines_of(LAYER, each) == defines)
            return SimpleNamespace(resources=nvrtc.Resources(*answers[found][:2]))

        def run():
            value = answers[plan.overrides["forward", LAYER]][2]
            if isinstance(value, BaseException):
                raise value
            return torch.ones(4), torch.full((4,), value)

        def seconds(replay, rounds, target):
            timed.append((plan.overrides["forward", LAYER], rounds))
            return answers[timed[-1][0]][3]

        def end():
            raise Ended

        for name, value in {
            "compile_all": lambda *_: None,
            "graphed": lambda run: run,
            "seconds": seconds,
            "passes": lambda _: {"forward": run},
            "is_faulty": lambda: faulty,
            "give_up": end,
        }.items():
            monkeypatch.setattr(plans, name, value)
        monkeypatch.setattr(plans.kernels, "kernel", kernel)
        try:
            return plans.measure("forward", LAYER, list(answers), journal), timed
        finally:
            assert not plan.overrides

    return measure


def test_plans_that_spill_or_fail_are_rows_without_a_time(script, measured, monkeypatch):
    plans = script("plans")
    chosen, slow, spilling, wrong, broken, *_ = script("candidates").step_plans("forward", LAYER, 132)
    answers = {chosen: (200, 8, 1.0, 1e-6), slow: (128, 0, 1.0, 2e-6), spilling: (255, 65, 1.0), wrong: (128, 0, 2.0)}
    answers[broken] = (128, 0, math.nan)
    compared = []
    monkeypatch.setattr(plans, "by_turns", lambda _, __, those, ___: compared.append(those) or [3e-6, 1e-6])
    rows, timed = measured(answers, plans.Journal())
    assert timed == [(chosen, 1), (chosen, 5), (slow, 1)]  # a short look is enough where a plan is far from the best
    assert [row["us"] != "" for row in rows] == [True, True, False, False, False]
    assert [row["spilled"] for row in rows] == [8, 0, 65, 0, 0]
    assert [bool(row["error"]) for row in rows] == [False, False, False, True, True]
    assert compared == [[chosen, slow]]
    assert [row["us_by_turns"] for row in rows] == [3.0, 1.0, "", "", ""]


def test_a_new_process_goes_on_after_a_plan_that_faults_or_hangs(script, measured, monkeypatch, tmp_path):
    plans = script("plans")
    chosen, first, fault, hang, last, *_ = script("candidates").step_plans("forward", LAYER, 132)
    answers = {chosen: (128, 0, 1.0, 2e-6), first: (128, 0, 1.0, 1e-6), fault: (128, 0, RuntimeError("CUDA error"))}
    answers |= {hang: (128, 0, KeyboardInterrupt()), last: (128, 0, 1.0, 3e-6)}
    monkeypatch.setattr(plans, "by_turns", lambda _, __, those, ___: [1e-6] * len(those))
    path = tmp_path / "journal.jsonl"
    with pytest.raises(Ended):
        measured(answers, plans.Journal(path), faulty=True)
    with pytest.raises(KeyboardInterrupt):  # in place of the end by whoever waited for too long
        measured(answers, plans.Journal(path))
    rows, timed = measured(answers, plans.Journal(path))
    assert [each for each, rounds in timed] == [chosen, chosen, last]  # the chosen one's result is needed once more
    assert [row["us"] for row in rows] == [2.0, 1.0, "", "", 3.0]
    assert [row["error"] for row in rows] == ["", "", "CUDA error", "hung, or ended its process", ""]
    assert [row["of_chosen"] for row in rows] == [1.0, 0.5, "", "", 1.5]


def test_nothing_is_compared_with_a_chosen_plan_that_failed(script, measured, tmp_path):
    plans = script("plans")
    chosen, other, *_ = script("candidates").step_plans("forward", LAYER, 132)
    answers = {chosen: (128, 0, RuntimeError("CUDA error")), other: (128, 0, 1.0, 1e-6)}
    path = tmp_path / "journal.jsonl"
    with pytest.raises(Ended):
        measured(answers, plans.Journal(path), faulty=True)
    rows, timed = measured(answers, plans.Journal(path))
    assert not timed
    assert [row["error"] for row in rows] == ["CUDA error", "not compared: the chosen plan failed"]


def test_the_fastest_plans_are_timed_by_turns_with_the_chosen_one(script, monkeypatch):
    plans = script("plans")
    times = [3.0, 9.0, "", 2.0, 1.0, 4.0]
    assert plans.finalists([{"us": us} for us in times]) == [0, 4, 3, 5]
    assert plans.finalists([{"us": ""}, {"us": 1.0}]) == []
    assert plans.finalists([{"us": 1.0}, {"us": ""}]) == []
    chosen, other, *_ = script("candidates").step_plans("forward", LAYER, 132)
    order = []

    def graphed(run):
        now = plan.overrides["forward", LAYER]
        return lambda: now

    def seconds(replay, rounds, target):
        order.append(replay())
        return len(order) * 1.0

    monkeypatch.setattr(plans, "graphed", graphed)
    monkeypatch.setattr(plans, "seconds", seconds)
    median = plans.ROUNDS // 2
    assert plans.by_turns("forward", LAYER, [chosen, other], lambda: None) == [2 * median + 1, 2 * median + 2]
    assert order == [chosen, other] * plans.ROUNDS
    assert not plan.overrides


def test_the_fastest_plan_is_kept_where_it_beats_the_chosen_one_by_more_than_chance(script, monkeypatch):
    plans = script("plans")
    monkeypatch.setattr(plans, "context", lambda _: "h200")
    for name in ("forward", "weight_grad"):
        found = plans.plans_of(name, LAYER, 132)[:3]
        rows = [{"us_by_turns": us} for us in (100.0, 99.0, "")]
        assert plans.fastest(name, LAYER, found, rows, 132) is None
        rows[1]["us_by_turns"] = 90.0
        best = plans.fastest(name, LAYER, found, rows, 132)
        assert (best["us"], best["before"], best["rows"]) == (90.0, 100.0, found[1].tile.rows)
        assert best["multiprocessors"] == (132 if name == "forward" else 0)
        assert plans.fastest(name, LAYER, found, [{"us_by_turns": ""}] * 3, 132) is None
