"""The timm adapter: in the real timm where it is installed, and against a stand-in that records what is registered."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from recnets import RecNet, create_model, list_models
from recnets.models import published, read_metadata

# torchvision's wheels load their operators only beside the PyTorch they were built for, and without them the import
# fails on these two. timm's models need neither, so a process of its own that knows their names can run the real timm.
OPERATORS = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

USE = """
import timm, torch
import recnets.timm
from recnets import create_model, list_models
from recnets.models import published

assert set(timm.list_models("recnet_*")) == set(list_models("recnet_*"))
assert set(timm.list_pretrained("recnet_*")) == set(published())
model = timm.create_model("recnet_60_1280", num_classes=100, in_chans=1, drop_rate=0.0).eval()
assert model(torch.randn(1, 1, 32, 32)).shape == (1, 100)
count = lambda *a, **k: sum(p.numel() for p in timm.create_model(*a, **k).parameters())
assert count("recnet_60_1280", num_classes=10) == 1_704_250
assert count("recnet_60_1280") == 1_733_140  # by default the classes of the weights that there are

x = torch.randn(2, 3, 32, 32)
names = ("recnet_60_480.cifar10_60ep", "recnet_60_480.cifar100", "recnet_60_480")  # the last by timm's default
for name in names:
    own = create_model(name if "." in name else "recnet_60_480.cifar100", pretrained=True).eval()
    model = timm.create_model(name, pretrained=True).eval()
    assert torch.equal(model(x), own(x))
data = timm.data.resolve_model_data_config(model)
assert data["mean"] == tuple(own.metadata["normalisation"]["mean"])
assert data["input_size"] == (3, 32, 32)
assert timm.create_model("recnet_60_480", pretrained=True, num_classes=7)(x).shape == (2, 7)

features = timm.create_model("recnet_60_480", pretrained=True, features_only=True).eval()
for mine, theirs in zip(own.forward_intermediates(x, intermediates_only=True), features(x), strict=True):
    assert torch.equal(mine, theirs)
    sizes = [(f.shape[1], 32 // f.shape[2]) for f in features(x)]
assert sizes == list(zip(features.feature_info.channels(), features.feature_info.reduction(), strict=True))
print("all good")
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_in_timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("the extra 'timm' is not installed")
    preamble = ""
    tried = python("import timm")
    if tried.returncode and "torchvision::nms does not exist" in tried.stderr:
        preamble = OPERATORS
        refused = python("import recnets.timm")
        assert "ImportError: recnets.timm needs timm, which cannot be imported here (RuntimeError: " in refused.stderr
        tried = python(f"{preamble}\nimport timm")
    if tried.returncode:
        pytest.skip(f"timm cannot be imported here: {tried.stderr.strip().splitlines()[-1]}")
    done = python(preamble + USE)
    assert done.stdout.strip() == "all good", done.stderr


@pytest.fixture
def adapter(monkeypatch):
    """`recnets.timm` on a stand-in for `timm.models` with the three functions that it uses."""
    registered = {}

    def register_model(fn):
        assert sys.modules[fn.__module__].default_cfgs  # where timm looks for them
        registered[fn.__name__] = fn
        return fn

    def build_model_with_cfg(model_cls, variant, pretrained, pretrained_cfg=None, feature_cfg=None, **kwargs):
        model = model_cls(**kwargs)
        model.seen = {"variant": variant, "pretrained": pretrained, "feature_cfg": feature_cfg}
        return model

    models = ModuleType("timm.models")
    models.register_model = register_model
    models.build_model_with_cfg = build_model_with_cfg
    models.generate_default_cfgs = dict
    package = ModuleType("timm")
    package.models = models
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    monkeypatch.delitem(sys.modules, "recnets.timm", raising=False)
    module = importlib.import_module("recnets.timm")
    module.registered = registered
    yield module
    sys.modules.pop("recnets.timm", None)


def test_every_recnet_is_registered(adapter):
    assert list(adapter.registered) == list_models("recnet_*")
    assert {name.split(".")[0] for name in adapter.default_cfgs} == set(list_models("recnet_*"))
    model = adapter.registered["recnet_60_480"](num_classes=7, in_chans=1, nonlinearity="relu")
    assert isinstance(model, RecNet)
    assert model.seen["variant"] == "recnet_60_480"
    assert not model.seen["pretrained"]
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)
    assert adapter.recnet_60_480.__name__ == "recnet_60_480"


def test_feature_info_is_true(adapter):
    for name in ("recnet_60_480", "recnet_60_640"):
        model = adapter.registered[name]()
        outputs = model.eval().forward_intermediates(torch.randn(1, 3, 16, 16), intermediates_only=True)
        found = [(o.shape[1], 16 // o.shape[2]) for o in outputs]
        assert found == [(f["num_chs"], f["reduction"]) for f in model.feature_info]
        modules = dict(model.named_modules())
        assert all(f["module"] in modules for f in model.feature_info)


def test_cfgs_are_those_of_the_weights(adapter):
    cfgs = adapter.published_cfgs()
    assert set(cfgs) <= set(published())
    for name, cfg in cfgs.items():
        about, model = read_metadata(name), create_model(name, pretrained=True)
        assert cfg["file"].endswith(f"{name}.safetensors")
        assert list(cfg["mean"]) == about["normalisation"]["mean"]
        assert list(cfg["label_names"]) == about["classes"]
        assert cfg["num_classes"] == model.num_classes
        assert isinstance(model.get_submodule(cfg["classifier"]), torch.nn.Linear)
        assert isinstance(model.get_submodule(cfg["first_conv"]), torch.nn.Conv2d)


def test_weights_with_hyper_parameters_of_their_own_are_left_out(adapter, monkeypatch):
    about = read_metadata(published()[0])
    about["model"]["overrides"] = {"squeezed": {}}
    monkeypatch.setattr(adapter, "read_metadata", lambda name: about)
    assert adapter.published_cfgs() == {}


def test_options_that_recnets_lack(adapter):
    with pytest.raises(ValueError, match=r"no dropout, got drop_rate=0.1"):
        adapter.registered["recnet_60_480"](drop_rate=0.1)
    with pytest.raises(TypeError, match="has no option 'global_pool'"):
        adapter.registered["recnet_60_480"](global_pool="max")


def test_reason_is_named_where_timm_cannot_be_imported(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist")

    for name in [n for n in sys.modules if n in ("timm", "recnets.timm") or n.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"\(RuntimeError: operator torchvision::nms .*'recnets\[timm\]'"):
        importlib.import_module("recnets.timm")
