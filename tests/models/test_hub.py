"""The Hub's layout: a folder comes back with its metadata, the mixin reads it, and what is missing is said clearly."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from recnets import RecNet, create_model
from recnets.deploy import squeeze
from recnets.errors import RecNetsError
from recnets.models import load_weights, published, read_metadata, save_weights

NO_HUB = "the extra 'hub' (huggingface_hub) is not installed"
TINY = "RecNet(2, 3, 2, 2, 3)"
METADATA = {
    "dataset": "digits",
    "classes": ["zero", "one"],
    "normalisation": {"mean": [0.5], "std": [0.25]},
    "image_size": [8, 8],
    "accuracy": 97.5,
    "recipe": {"data": "digits", "lr": 0.1, "teacher": None},
    "command": "recnet train --recipe quick",
    "seed": 3,
}


def tiny(**options):
    return create_model(TINY, **{"num_classes": 2, "in_channels": 1, **options}).eval()


def same(a, b):
    x = torch.randn(3, a.in_channels, 8, 8)
    with torch.no_grad():
        return torch.equal(a(x), b(x))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason=NO_HUB)
    constants = pytest.importorskip("huggingface_hub.constants", reason=NO_HUB)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


@pytest.mark.parametrize(
    "options",
    [{}, {"head": "hidden", "nonlinearity": "relu", "kernel_h": 1}, {"backend": "torch", "padding_mode": "circular"}],
    ids=str,
)
def test_round_trip_of_a_folder(tmp_path, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # folders need no extra
    model = tiny(**options)
    folder = model.save_pretrained(tmp_path / "a" / "net", metadata=METADATA)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    back = RecNet.from_pretrained(folder)
    assert type(back) is RecNet
    assert not back.training
    assert same(model, back)
    assert {key: back.metadata[key] for key in METADATA} == METADATA
    config = json.loads((folder / "config.json").read_text())
    assert "backend" not in config
    assert same(back, RecNet.from_pretrained(back.save_pretrained(tmp_path / "b")))
    assert read_metadata(tmp_path / "b") == read_metadata(folder)  # carried by the model
    assert same(model, load_weights(folder)[0])  # whatever takes weights takes the folder


def test_config_holds_the_arguments_of_the_class(tmp_path):
    model = tiny(head="hidden", nonlinearity="relu")
    model.save_pretrained(tmp_path)
    again = RecNet(**json.loads((tmp_path / "config.json").read_text()))
    again.load_state_dict(model.state_dict())
    assert same(model, again.eval())


def test_squeezed_comes_back(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.stages[0][0].crc.norm.weight[:2] = 0
    small = squeeze(model, 0.0)
    back = RecNet.from_pretrained(small.save_pretrained(tmp_path))
    assert sum(p.numel() for p in back.parameters()) < sum(p.numel() for p in model.parameters())
    assert same(small, back)
    assert "squeezed" in json.loads((tmp_path / "config.json").read_text())
    assert ", squeezed" in (tmp_path / "README.md").read_text()


def test_the_mixin_reads_the_folder(tmp_path, hub):
    class Mixed(hub.PyTorchModelHubMixin, RecNet):
        pass

    model = tiny(head="hidden")
    model.save_pretrained(tmp_path, metadata=METADATA)
    assert same(model, Mixed.from_pretrained(tmp_path, strict=True))


def test_card_is_what_the_hub_reads(tmp_path, hub):
    tiny().save_pretrained(tmp_path, metadata=METADATA, license="mit", repo_id="someone/net")
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.license == "mit"
    assert card.data.library_name == "recnets"
    assert card.data.datasets == ["digits"]
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("digits", "accuracy", 97.5)
    for text in ("97.50 %", "zero, one", "| mean | 0.5 |", "| std | 0.25 |", "lr = 0.1", "recnet train --recipe quick"):
        assert text in card.text
    assert 'RecNet.from_pretrained("someone/net")' in card.text


@pytest.mark.parametrize("name", published())
def test_card_of_published_weights_runs(name, tmp_path, monkeypatch):
    """What the card tells a reader to paste works, and gives the model that was saved."""
    model = create_model(name, pretrained=True).eval()
    model.save_pretrained(tmp_path / "net", dtype=torch.float16)
    card = (tmp_path / "net" / "README.md").read_text(encoding="utf-8")
    known = read_metadata(name)
    assert f"| accuracy | {known['accuracy']:.2f} % of the test set (top-1) |" in card
    assert f"| parameters | {known['parameters']:,} |" in card
    assert known["command"] in card
    assert known.get("commits", "") in card
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.DOTALL | re.MULTILINE)
    namespace = {}
    exec(code, namespace)
    assert namespace["logits"].shape == (1, len(known["classes"]))
    assert same(model, namespace["model"])  # the published file holds 16 bits too


def test_card_without_metadata(tmp_path, monkeypatch):
    tiny().save_pretrained(tmp_path / "net")
    card = (tmp_path / "net" / "README.md").read_text(encoding="utf-8")
    assert "accuracy" not in card
    assert "## Training" not in card
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"^```python\n(.*?)^```", card, flags=re.DOTALL | re.MULTILINE).group(1), {})


def test_card_hides_the_folders_above_a_data_set(tmp_path):
    tiny().save_pretrained(tmp_path, metadata={"dataset": "folder:/home/me/birds/", "accuracy": 50.0})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| data | birds |" in card
    assert "/home/me" not in card
    assert "datasets:" not in card  # those of the Hub


def test_an_edited_card_is_kept_unless_asked(tmp_path):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    tiny().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    tiny().save_pretrained(tmp_path, overwrite_card=True)
    assert (tmp_path / "README.md").read_text() != "mine"


def test_new_classes_leave_only_what_is_still_true(tmp_path):
    tiny().save_pretrained(tmp_path, metadata=METADATA)
    other = RecNet.from_pretrained(tmp_path, num_classes=5)
    assert other(torch.randn(2, 1, 8, 8)).shape == (2, 5)
    assert other.metadata == {key: METADATA[key] for key in ("normalisation", "image_size")}
    assert create_model(published()[0], pretrained=True, num_classes=7).metadata.keys() == other.metadata.keys()
    with pytest.raises(ValueError, match="name 2 classes, the model has num_classes=5"):
        other.save_pretrained(tmp_path / "b", metadata=METADATA)
    assert not (tmp_path / "b").exists()


def test_published_names_and_other_networks(tmp_path):
    for name in published():
        assert RecNet.from_pretrained(name).metadata["accuracy"] == read_metadata(name)["accuracy"]
    save_weights(tmp_path / "other.safetensors", create_model("resnet_110"), {})
    with pytest.raises(RecNetsError, match="holds a ResNet, not a RecNet"):
        RecNet.from_pretrained(tmp_path / "other.safetensors")


def test_missing_repository_offline(hub):
    with pytest.raises(RecNetsError, match=r"'someone/net' is neither a folder .* \(HF_HUB_OFFLINE is set\)"):
        RecNet.from_pretrained("someone/net")
    with pytest.raises(RecNetsError, match="no repository can have that name"):
        RecNet.from_pretrained("./no/such/folder")


def test_repository_from_the_cache(tmp_path, hub):
    """A repository that was downloaded before is read without the network."""
    commit = "0" * 40
    stored = tmp_path / "cache" / "models--someone--net"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    model = tiny()
    model.save_pretrained(stored / "snapshots" / commit, metadata=METADATA)
    assert same(model, RecNet.from_pretrained("someone/net", cache_dir=tmp_path / "cache"))


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RecNetsError, match=r"'someone/net' is neither .* pip install 'recnets\[hub\]'"):
        RecNet.from_pretrained("someone/net")
    with pytest.raises(RecNetsError, match=r"pip install 'recnets\[hub\]'"):
        tiny().push_to_hub("someone/net")


def test_push(tmp_path, hub, monkeypatch):
    seen = {}

    class Api:
        def __init__(self, token=None):
            seen["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            return SimpleNamespace(repo_id=f"someone/{repo_id}")

        def upload_folder(self, *, repo_id, folder_path, commit_message, revision):
            seen["config"] = json.loads((tmp_path / folder_path / "config.json").read_text())
            seen["card"] = (tmp_path / folder_path / "README.md").read_text()
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(hub, "HfApi", Api)
    assert tiny().push_to_hub("net", token="t") == "https://hub/someone/net"
    assert seen["token"] == "t"
    assert seen["config"]["num_classes"] == 2
    assert 'RecNet.from_pretrained("someone/net")' in seen["card"]
    seen.clear()
    tiny().save_pretrained(tmp_path / "net", push_to_hub=True)
    assert seen["config"]["num_classes"] == 2


def test_push_without_a_network(hub):
    with pytest.raises(RecNetsError, match="cannot upload to the repository 'someone/net'"):
        tiny().push_to_hub("someone/net")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecNetsError, match="cannot make the folder"):
        tiny().save_pretrained(tmp_path / "file" / "net")
