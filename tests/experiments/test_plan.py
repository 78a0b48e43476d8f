"""What is left to do, how long it takes, and in which order."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from recnets.experiments import cost, local, plan
from recnets.experiments.ledger import Ledger
from recnets.experiments.paper import PAPER_TABLES
from recnets.experiments.plan import make_plan, measured, ordered, with_times
from recnets.experiments.reproduce import Reproduce, chosen_places, listing
from recnets.experiments.runs import Protocol, places

PAPER = Protocol.of(None)


@pytest.mark.slow
def test_dry_run_lists_every_row(tmp_path, make_entry):
    found = places(PAPER_TABLES, None, 1, PAPER)
    ledger = Ledger(tmp_path)
    ledger.add(make_entry(found[2].runs[0], 95.0, seconds=10.0))
    steps = make_plan(found, ledger, tmp_path / "work")
    steps = with_times(steps, measured(ledger, tmp_path, steps, "a device"))
    text = listing(found, steps, "a device")
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(rows) == 80
    assert len({line.split()[0] for line in rows}) == 72
    assert sum("the same run as above" in line for line in rows) == 8
    assert all("parameters" in line and "M mult-adds" in line for line in rows)
    assert "  recnet_60_1280-cifar10-s0 " in rows[2]
    assert "1,704,250 parameters    863.1 M mult-adds  done" in rows[2]
    assert "80 rows, 72 runs, 1 done" in text


def test_times_are_measured_or_scaled(tmp_path, make_entry):
    found = places(["2"], ["cifar100"], 2, PAPER)
    ledger, runs = Ledger(tmp_path), {run.name: run for place in found for run in place.runs}
    ledger.add(make_entry(runs["recnet_60_640-cifar100-s0"], 70.0, seconds=3.0))
    ledger.add(make_entry(runs["recnet_60_1280-cifar100-s0"], 78.0, seconds=7.0))
    ledger.add(make_entry(runs["recnet_60_480-cifar100-s0"], 78.0, seconds=1.0, device="another device"))
    steps = make_plan(found, ledger, tmp_path / "work")
    timed = {s.run.name: s for s in with_times(steps, measured(ledger, tmp_path, steps, "a device"))}
    assert timed["recnet_60_640-cifar100-s0"].state == "done"
    again = timed["recnet_60_1280-cifar100-s1"]  # the same network with another seed
    assert (again.seconds, again.basis) == (pytest.approx(200 * 7.0), "measured")
    near = timed["recnet_60_960-cifar100-s0"]  # about as large as recnet_60_1280
    ratio = near.cost.macs / timed["recnet_60_1280-cifar100-s0"].cost.macs
    assert (near.seconds, near.basis) == (pytest.approx(200 * 7.0 * ratio), "scaled from recnet_60_1280")
    assert timed["recnet_60_480-cifar100-s1"].basis == "scaled from recnet_60_640"  # the other device does not count


def test_of_several_measurements_the_fastest_counts(tmp_path, make_entry):
    """The others were short, with their start in the time, or shared the device."""
    found = places(["2"], ["cifar100"], 3, PAPER)
    ledger, runs = Ledger(tmp_path), {run.name: run for place in found for run in place.runs}
    ledger.add(make_entry(runs["recnet_60_480-cifar100-s0"], 70.0, seconds=8.0))
    ledger.add(make_entry(runs["recnet_60_480-cifar100-s1"], 70.0, seconds=2.0))
    steps = make_plan(found, ledger, tmp_path / "work")
    timed = {s.run.name: s for s in with_times(steps, measured(ledger, tmp_path, steps, "a device"))}
    assert timed["recnet_60_480-cifar100-s2"].seconds == pytest.approx(200 * 2.0)


def test_starts_and_shared_epochs_are_not_the_pace(tmp_path, make_entry):
    found = places(["2"], ["cifar100"], 2, PAPER)
    ledger, runs = Ledger(tmp_path), {run.name: run for place in found for run in place.runs}
    entry = make_entry(runs["recnet_60_480-cifar100-s0"], 70.0, seconds=2.0)
    for row in entry["epochs"][10:]:
        row["seconds"] += 500.0  # the eleventh epoch began with a new start
    ledger.add(entry)
    steps = make_plan(found, ledger, tmp_path / "work")
    timed = {s.run.name: s for s in with_times(steps, measured(ledger, tmp_path, steps, "a device"))}
    assert timed["recnet_60_480-cifar100-s1"].seconds == pytest.approx(200 * 2.0)


def test_most_rows_early(tmp_path, make_entry):
    found = places(["1a", "1b", "1c", "1d", "2"], ["cifar100"], 2, PAPER)
    ledger = Ledger(tmp_path)
    ledger.add(make_entry(found[0].runs[0], 75.0))
    work = tmp_path / "work"
    begun = work / "recnet_120_2560-cifar100-s0"
    begun.mkdir(parents=True)
    (begun / "checkpoint.pt").touch()
    lines = [json.dumps({"epoch": e, "seconds": 30.0 * e}) + "\n" for e in range(1, 200)]
    (begun / "metrics.jsonl").write_text("".join(lines) + '{"epoch": 200, "sec')  # a line cut short
    steps = make_plan(found, ledger, work)
    steps = with_times(steps, measured(ledger, work, steps, "a device"))
    order = [step.run.name for step in ordered(steps)]
    state = {step.run.name: step for step in steps}
    assert (state[begun.name].state, state[begun.name].epochs_done) == ("interrupted", 199)
    assert state[begun.name].seconds == pytest.approx(30.0)
    assert order[0] == begun.name  # one epoch from its end
    assert found[0].runs[0].name not in order
    first = [name for name in order if name.endswith("-s0")]
    assert order[: len(first)] == first  # every row once before any row twice
    # Five rows wait for this one: it comes before smaller networks with one row each.
    assert order.index("recnet_60_1280-cifar100-s0") < order.index("recnet_120_960-cifar100-s0")


def test_without_any_measurement_a_step_is_timed(tmp_path):
    import torch

    found = places(["demo"], None, 1, PAPER)
    steps = with_times(make_plan(found, Ledger(tmp_path), tmp_path), [], torch.device("cpu"))
    assert all(0 < step.seconds < 3600 for step in steps)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_run_starts_without_being_timed(tmp_path, monkeypatch, rows):
    timed, started = [], []
    monkeypatch.setattr(plan, "time_a_step", lambda *args: timed.append(args) or plan._pace("digits", "x", {}, 1, 1.0))
    monkeypatch.setattr(local, "run_jobs", lambda jobs, *args: started.extend(jobs))
    only = ("*kernel_h*", "*kernel_x*")[:rows]
    request = Reproduce(table=("demo",), only=only, results=tmp_path, work=tmp_path / "work", device="cpu")
    assert request.run() == 0
    assert len(started) == rows
    assert bool(timed) == (rows > 1)


def test_steps_are_timed_as_training_does_them(monkeypatch):
    """Tiny pictures: whole batches and one thread, unless others are asked for; afterwards all is as before."""
    used = []

    def build(*args):
        network = cost.build(*args)
        forward = network.forward
        network.forward = lambda x: used.append((torch.get_num_threads(), len(x))) or forward(x)
        return network

    monkeypatch.setattr(plan, "build", build)
    digits, cifar = (next(iter(places([t], None, 1, PAPER))).runs[0] for t in ("demo", "2"))
    small = dataclasses.replace(digits, recipe=dataclasses.replace(cifar.recipe, model=digits.model, model_options={}))
    torch.set_num_threads(3)
    try:
        pace = plan.time_a_step(digits, torch.device("cpu"))
        plan.time_a_step(digits, torch.device("cpu"), 2)
        plan.time_a_step(small, torch.device("cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert set(used[:3]) == {(1, 64)}
    assert set(used[3:6]) == {(2, 64)}
    assert set(used[6:]) == {(3, 16)}
    assert (pace.dataset, pace.family) == ("digits", "recnet")


def test_only_recnets_are_given_a_backend(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(local, "run_jobs", lambda jobs, *args: started.extend(jobs))
    monkeypatch.setattr(plan, "time_a_step", lambda *args: plan._pace("cifar100", "x", {}, 1, 1.0))
    asked = {"only": ("recnet_60_480", "mobilenet"), "dataset": ("cifar100",), "device": "cpu", "backend": "torch"}
    assert Reproduce(**asked, table=("2", "3"), results=tmp_path, work=tmp_path / "work").run() == 0
    given = {job.recipe["model"]: job.options["backend"] for job in started}
    assert given == {"recnet_60_480": "torch", "mobilenet": "auto"}


def test_a_backend_that_cannot_run_here_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("recnets.ops.dispatch.AVAILABLE", False)
    request = Reproduce(table=("demo",), backend="triton", results=tmp_path / "r", work=tmp_path / "w", device="cpu")
    with pytest.raises(ValueError, match="'triton' cannot run here"):
        request.run()
    assert list(tmp_path.iterdir()) == []


def test_only_chooses_runs():
    def names(*only, **more):
        return {run.name for place in chosen_places(Reproduce(only=only, **more)) for run in place.runs}

    assert names("recnet_60_480-cifar10-s0") == {"recnet_60_480-cifar10-s0"}
    assert names("RecNet-60-480", table=("2",)) == {"recnet_60_480-cifar10-s0", "recnet_60_480-cifar100-s0"}
    assert names("*relu*", dataset=("cifar100",), table=("1",)) == {
        "recnet_60_1280-nonlinearity_relu-cifar100-s0",
        "recnet_60_1280-nonlinearity_shared_bn_relu-cifar100-s0",
    }
    assert names("*head_hidden-cifar100*") == {
        "recnet_60_1280-head_hidden-cifar100-s0",
        "recnet_60_480-head_hidden-cifar100-s0",
        "recnet_90_960-head_hidden-cifar100-s0",
        "recnet_90_640-head_hidden-cifar100-s0",
    }
    with pytest.raises(ValueError, match=r"recnet_60_48.*did you mean 'recnet_60_480'"):
        names("recnet_60_48")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"dataset": ("cifar",)}, "dataset must be one of.*did you mean"),
        ({"max_seconds": 3.0}, "max_seconds must be more than 10"),
        ({"engine": "slurm"}, "engine must be one of"),
        ({"epochs_until": 0}, "epochs_until must be at least 1"),
        ({"backend": "foo"}, "backend must be one of"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_wrong_requests(values, message):
    with pytest.raises(ValueError, match=message):
        Reproduce(**values)


def test_wrong_tables_and_settings():
    with pytest.raises(ValueError, match="table must be one of"):
        chosen_places(Reproduce(table=("4",)))
    with pytest.raises(ValueError, match="expected KEY=VALUE, got 'fast'"):
        chosen_places(Reproduce(set=("fast",)))
    with pytest.raises(ValueError, match="set cannot change seed"):
        chosen_places(Reproduce(set=("seed=3",)))
