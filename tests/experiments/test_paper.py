"""The tables as data: what the paper has, each network once."""

from __future__ import annotations

from collections import Counter

import pytest

from recnets.experiments.cost import SHAPES, build, cost, parameters
from recnets.experiments.paper import PAPER_TABLES, TABLES
from recnets.experiments.points import printed_millions
from recnets.experiments.runs import Protocol, distinct, places
from recnets.models.profile import profile

PAPER = Protocol.of(None)


def test_every_row_of_the_paper_is_there():
    counts = {name: len(TABLES[name].rows) for name in PAPER_TABLES}
    assert counts == {"1a": 4, "1b": 4, "1c": 3, "1d": 2, "2": 12, "3": 15}
    assert all(TABLES[name].datasets == ("cifar10", "cifar100") for name in PAPER_TABLES)


def test_a_network_in_several_tables_is_one_run():
    found = places(PAPER_TABLES, None, 1, PAPER)
    assert len(found) == 2 * 40
    shared = Counter(run.name for place in found for run in place.runs)
    assert shared["recnet_60_1280-cifar100-s0"] == 5  # Tables 1a to 1d, and 2
    assert len(distinct(found)) == 2 * (10 + 11 + 15)
    assert sum(count > 1 for count in shared.values()) == 2
    by_recipe = {run.name: run.recipe for run in distinct(found)}
    assert len({str(recipe.to_dict()) for recipe in by_recipe.values()}) == len(by_recipe)


def test_rows_of_one_network_agree_on_its_accuracy():
    seen: dict[tuple[str, str], dict[str, float]] = {}
    for name in PAPER_TABLES:
        for row in TABLES[name].rows:
            key = (row.model, str(sorted(row.overrides.items())))
            assert seen.setdefault(key, dict(row.accuracy)) == dict(row.accuracy)


def test_runs_follow_the_papers_recipe():
    run = places(["1b"], ["cifar100"], 2, PAPER)[1].runs[1]
    assert run.name == "recnet_60_1280-e_2-cifar100-s1"
    recipe = run.recipe
    assert (recipe.epochs, recipe.restarts, recipe.batch_size, recipe.lr) == (200, (20, 60, 120), 64, 0.1)
    assert (recipe.model, recipe.model_options, recipe.data, recipe.seed) == ("recnet_60_1280", {"e": 2}, "cifar100", 1)


def test_another_protocol_has_another_name_and_another_precision_has_not():
    row = TABLES["2"].rows[0]
    names = [
        Protocol.of(recipe, settings).run("2", row, "cifar10", 0).name
        for recipe, settings in ((None, {}), (None, {"precision": "bf16"}), (None, {"decay": "weights"}), ("quick", {}))
    ]
    assert names == [
        "recnet_60_640-cifar10-s0",
        "recnet_60_640-cifar10-s0",
        "recnet_60_640-cifar10-decay_weights-s0",
        "recnet_60_640-cifar10-quick-s0",
    ]


def test_the_hidden_head_explains_the_printed_counts():
    """All of Tables 1b to 1d and nine rows of Table 2, to the last thousand."""
    unexplained = []
    for name in ("1b", "1c", "1d", "2"):
        for row in TABLES[name].rows:
            count = parameters(row.model, {**row.overrides, "head": "hidden"}, "cifar100")
            if round(count / 1000) != round(printed_millions(row.parameters) * 1000):
                unexplained.append(row.title)
    assert unexplained == ["RecNet-60-480", "RecNet-90-640", "RecNet-90-1280"]


@pytest.mark.parametrize(
    ("model", "s", "d", "printed", "digits"),
    [
        ("recnet_60_480", 8, (5, 10), 316e3, -3),
        ("recnet_90_640", 8, (10, 15), 537e3, -3),
        ("recnet_90_1280", 16, (10, 15), 2028e3, -3),
        ("recnet_120_2880", 24, (10, 20), 8.2e6, -5),
    ],
)
def test_a_wider_transition_would_explain_the_other_counts(model, s, d, printed, digits):
    """One of the first stage that gives d_2 segments, where the layer after it reads d_1: with its BN."""
    count, more = parameters(model, {"head": "hidden"}, "cifar100"), s * (d[1] - d[0])
    assert round(count, digits) != printed
    assert round(count + 4 * s * d[0] * more + 2 * more, digits) == printed


@pytest.mark.parametrize(
    ("model", "overrides", "dataset"),
    [
        ("recnet_60_480", {}, "cifar100"),
        ("recnet_60_480", {"head": "hidden"}, "cifar10"),
        ("densenet_bc_40_18", {}, "cifar100"),
        ("RecNet(2, 4, 8, 3, 3)", {"nonlinearity": "relu"}, "digits"),
    ],
)
def test_cost_is_what_the_profile_counts(model, overrides, dataset):
    full = profile(build(model, overrides, dataset, "cpu"), SHAPES[dataset][2])
    assert cost(model, overrides, dataset) == (full.parameters, full.macs)
