"""Models by name."""

import pytest
import torch
from torch import nn

from recnets import RecNet, create_model, list_models
from recnets.models import ModelConfig, model_info, register_model, registry

TABLE_2 = {
    "RecNet-60-640": (4, (4, 8, 16), (10, 10, 10)),
    "RecNet-90-960": (4, (4, 8, 16), (15, 15, 15)),
    "RecNet-120-1280": (4, (4, 8, 16), (20, 20, 20)),
    "RecNet-60-1280": (4, (8, 16, 32), (10, 10, 10)),
    "RecNet-90-1920": (4, (8, 16, 32), (15, 15, 15)),
    "RecNet-120-2560": (4, (8, 16, 32), (20, 20, 20)),
    "RecNet-60-480": (4, (8, 8, 8), (5, 10, 15)),
    "RecNet-90-640": (4, (8, 8, 8), (10, 15, 20)),
    "RecNet-120-960": (4, (8, 8, 8), (10, 20, 30)),
    "RecNet-60-960": (4, (16, 16, 16), (5, 10, 15)),
    "RecNet-90-1280": (4, (16, 16, 16), (10, 15, 20)),
    "RecNet-120-1920": (4, (16, 16, 16), (10, 20, 30)),
}


@pytest.mark.parametrize("title", TABLE_2)
def test_table_2(title):
    name = title.lower().replace("-", "_")
    e, s, d = TABLE_2[title]
    notation = f"RecNet({e}, {', '.join(map(str, s))}, {', '.join(map(str, d))})"
    for spelling in (name, title, title.lower(), notation, notation.replace(" ", "")):
        with torch.device("meta"):
            model = create_model(spelling)
        assert isinstance(model, RecNet)
        assert (model.e, model.s, model.d) == (e, s, d)
    assert model_info(name).title == title
    assert model_info(name).family == "recnet"


def test_list_models():
    assert list_models("recnet_*")[:12] == [t.lower().replace("-", "_") for t in TABLE_2]
    assert list_models("recnet_60_*") == ["recnet_60_640", "recnet_60_1280", "recnet_60_480", "recnet_60_960"]
    assert set(list_models("recnet_*")) <= set(list_models())
    assert list_models("nothing*") == []


def test_every_model_builds_what_its_record_says():
    for name in list_models():
        info = model_info(name)
        assert info.name == name
        assert info.title
        assert info.family
    assert "guessed" in model_info("recnet_30_60").note


def test_defaults_and_overrides():
    model = create_model(
        "recnet_60_480", s=[2, 2], d=[1, 2], e=1, head="hidden", kernel_h=1, num_classes=7, in_channels=1
    )
    assert (model.e, model.s, model.d, model.head) == (1, (2, 2), (1, 2), "hidden")
    assert (model.num_classes, model.in_channels) == (7, 1)
    assert create_model("RecNet(2, 1, 3)").num_classes == 10
    assert create_model("RecNet(2, 1, 3)", e=3).e == 3


@pytest.mark.parametrize("name", ["RecNet-60-480", "RecNet(2, 1, 3)"])
def test_config_builds_the_model_again(name):
    model = create_model(name, num_classes=3, in_channels=2, e=1, s=(2,), d=(2,), nonlinearity="linear")
    again = model.config.build()
    assert again.config == model.config
    assert repr(again) == repr(model)
    shapes = {k: v.shape for k, v in model.state_dict().items()}
    assert {k: v.shape for k, v in again.state_dict().items()} == shapes


def test_a_recnet_built_directly_has_a_config_too():
    model = RecNet(2, (3, 1), (2, 4), num_classes=5, in_channels=1, head="hidden", kernel_x=1)
    assert model.config == ModelConfig("RecNet(2, 3, 1, 2, 4)", 5, 1, {"head": "hidden", "kernel_x": 1})
    assert repr(model.config.build()) == repr(model)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("recnet_60_1208", {}, ValueError, "unknown model 'recnet_60_1208'; did you mean 'recnet_60_1280'"),
        ("RecNet-60-1208", {}, ValueError, "did you mean 'RecNet-60-1280'"),
        ("nonsense", {}, ValueError, r"unknown model 'nonsense' \(`recnet list` shows all"),
        ("", {}, ValueError, "unknown model ''"),
        (None, {}, TypeError, "a model's name must be a str, got NoneType"),
        ("RecNet(4, 8, 10, 10)", {}, ValueError, "an odd count of at least 3 numbers, got 4"),
        ("RecNet(4)", {}, ValueError, "an odd count of at least 3 numbers, got 1"),
        ("RecNet()", {}, ValueError, r"holds integers, as in .*, got 'RecNet\(\)'"),
        ("RecNet(4, 8, x)", {}, ValueError, r"holds integers, as in .*, got 'RecNet\(4, 8, x\)'"),
        ("RecNet(4, 0, 3)", {}, ValueError, "each of s must be at least 1, got 0"),
        ("recnet_60_480", {"num_classes": -1}, ValueError, "num_classes must be at least 0, got -1"),
        ("recnet_60_480", {"num_classes": "10"}, TypeError, "num_classes must be an int, got '10' of type str"),
        ("recnet_60_480", {"in_channels": 0}, ValueError, "in_channels must be at least 1, got 0"),
        ("recnet_60_480", {"heads": 1}, TypeError, "a RecNet has no option 'heads'; did you mean 'head'"),
    ],
)
def test_wrong_use(name, options, error, message):
    with pytest.raises(error, match=message):
        create_model(name, **options)


def test_model_info_of_an_unknown_name():
    with pytest.raises(ValueError, match="unknown model 'recnet_6_480'; did you mean"):
        model_info("recnet_6_480")


def test_register_model(monkeypatch):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    monkeypatch.setattr(registry, "_INFO", dict(registry._INFO))

    @register_model(title="Tiny-1", family="tiny")
    def tiny_1(**kwargs):
        return nn.Linear(kwargs["in_channels"], kwargs["num_classes"])

    assert "tiny_1" in list_models("tiny*")
    assert create_model("Tiny-1", num_classes=4).out_features == 4
    assert model_info("tiny_1").paper_params is None
    with pytest.raises(ValueError, match="a model named 'tiny_1' is registered already"):
        register_model(title="Tiny-1", family="tiny")(tiny_1)
