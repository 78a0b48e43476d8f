"""`recnet list` and `recnet info`: what they print, for people and for programs."""

from __future__ import annotations

import json

import pytest

from recnets import list_models
from recnets.cli.main import main
from recnets.deploy import squeeze
from recnets.models import load_weights, save_weights


def run(capsys, *arguments):
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_list_json(capsys):
    rows = json.loads(run(capsys, "list", "recnet_60_*", "--json"))
    assert [row["name"] for row in rows] == list_models("recnet_60_*")
    row = next(row for row in rows if row["name"] == "recnet_60_1280")
    assert row["parameters"] == 1_733_140
    assert row["parameters_hidden_head"] == 1_768_900
    assert row["paper_parameters"] == "1,769K"
    assert (row["e"], row["s"], row["d"], row["depth"], row["width"]) == (4, [8, 16, 32], [10, 10, 10], 60, 1280)
    assert row["macs"] == 863_124_736


def test_list_table(capsys):
    text = run(capsys, "list", "recnet_60_*0")
    assert "1,733,140" in text
    assert "1,769K" in text
    assert "863.1M" in text
    assert "recnet_90_960" not in text


def test_published_weights_are_named(capsys):
    text = run(capsys, "list", "recnet_60_480")
    assert "published weights: recnet_60_480.cifar100 (cifar100, 73.26 %), recnet_60_480.cifar10_60ep (" in text
    assert "published weights" not in run(capsys, "list", "recnet_60_640")
    (row,) = json.loads(run(capsys, "list", "recnet_60_480", "--json"))
    assert row["weights"][0] == {"name": "recnet_60_480.cifar100", "dataset": "cifar100", "accuracy": 73.26}
    assert "recnet_60_480.cifar100 (" in run(capsys, "info", "RecNet-60-480")


def test_info_of_published_weights(capsys):
    text = run(capsys, "info", "recnet_60_480.cifar10_60ep")
    assert "274,850 (paper: 316K)" in text  # ten classes: the weights' own
    assert "recnet_60_480.cifar10_60ep (cifar10, 92.91 %)" in text
    assert "recnet_60_480.cifar100" not in text
    assert json.loads(run(capsys, "info", "recnet_60_480.cifar100", "--json"))["parameters"] == 285_740


def test_list_holds_models_of_other_families(capsys):
    names = [name for name in list_models() if not name.startswith("recnet")]
    assert names
    row = json.loads(run(capsys, "list", names[0], "--json"))[0]
    assert row["parameters_hidden_head"] is None
    assert "e" not in row
    assert names[0] in run(capsys, "list", names[0])


def test_list_without_a_match(capsys):
    assert main(["list", "recnet_60_128"]) == 2
    assert "no model matches 'recnet_60_128'; did you mean 'recnet_60_1280'" in capsys.readouterr().err


def test_info_table(capsys):
    text = run(capsys, "info", "recnet_60_1280")
    for expected in (
        *("CONV (3×3) + BN + ReLU", "CRC (8, 32, 10)", "TB (320, 80)", "Max Pooling (2×2)"),
        *("Average Pooling (8×8)", "Linear (320, 100)", "186,880", "108,527,616"),
        *("1,733,140 (paper: 1,769K)", "286×286", "RecNet(4, 8, 16, 32, 10, 10, 10), linear head"),
    ):
        assert expected in text
    assert text.count("CRC (") == 6


def test_info_options(capsys):
    plain = json.loads(run(capsys, "info", "recnet_60_480", "--json"))
    assert plain["head"] == "linear"
    assert plain["image_size"] == [32, 32]
    hidden = json.loads(
        run(capsys, "info", "RecNet-60-480", "--head", "hidden", "--image-size", "64", "--num-classes", "10", "--json")
    )
    assert hidden["name"] == "recnet_60_480"
    assert hidden["layers"][0]["out_size"] == [64, 64]
    assert hidden["layers"][-1]["out_channels"] == 10
    assert hidden["macs"] > 3.9 * plain["macs"]
    grey = json.loads(run(capsys, "info", "recnet_60_480", "--in-channels", "1", "--json"))
    assert plain["parameters"] - grey["parameters"] == 2 * 9 * 40


def test_info_of_the_papers_notation(capsys):
    result = json.loads(run(capsys, "info", "RecNet(2, 3, 4)", "--num-classes", "5", "--json"))
    assert (result["e"], result["s"], result["d"]) == (2, [3], [4])
    assert result["paper_parameters"] is None


def test_info_of_a_file_and_of_a_run(capsys, tmp_path):
    model, metadata = load_weights("recnet_60_480.cifar100")
    small = squeeze(model)
    about = {"dataset": "cifar100", "image_size": [16, 16], "squeezed": {"parameters_before": metadata["parameters"]}}
    save_weights(tmp_path / "last.safetensors", small, about)
    for source in (tmp_path, tmp_path / "last.safetensors"):
        text = run(capsys, "info", str(source))
        assert "RecNet-60-480" in text
        assert f"{sum(p.numel() for p in small.parameters()):,}" in text
        assert "from 285,740 parameters" in text
        found = json.loads(run(capsys, "info", str(source), "--json"))
        assert found["layers"][0]["out_size"] == [16, 16]
        assert found["weights"] == [{"name": str(source), "dataset": "cifar100", "accuracy": None}]
    assert main(["info", str(tmp_path), "--num-classes", "3"]) == 2
    assert "holds trained weights, whose network is what it is: leave out --num-classes" in capsys.readouterr().err


def test_a_networks_name_comes_before_a_folder_of_that_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recnet_60_480").mkdir()
    assert "285,740" in run(capsys, "info", "recnet_60_480")
    assert main(["info", "runs/absent"]) in (1, 2)
    assert "'runs/absent' is neither a weights file nor a run folder" in capsys.readouterr().err


def test_info_says_what_is_guessed(capsys):
    assert "guessed" in run(capsys, "info", "recnet_30_60")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recnet_60_1281"], "unknown model 'recnet_60_1281'; did you mean 'recnet_60_1280'"),
        (["recnet_60_1280", "--image-size", "3"], "needs at least 4×4 pixels, got 3×3"),
        (["recnet_60_1280", "--image-size", "0"], "image_size must be at least 1, got 0"),
        (["recnet_60_1280", "--num-classes", "-1"], "num_classes must be at least 0, got -1"),
        (["RecNet(4, 8)"], "an odd count of at least 3 numbers, got 2"),
    ],
)
def test_wrong_use(arguments, message, capsys):
    assert main(["info", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
