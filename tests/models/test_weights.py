"""Weights files: what is written comes back, and whatever is wrong with a file is said clearly."""

import json

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from recnets.cli.main import main
from recnets.data import load_dataset
from recnets.errors import RecNetsError
from recnets.models import create_model, load_weights, published, read_metadata, save_weights, weights

TINY = "RecNet(2, 3, 2, 2, 3)"
METADATA = {
    "dataset": "digits",
    "classes": ["zero", "one"],
    "normalisation": {"mean": [0.5], "std": [0.25]},
    "image_size": [8, 8],
    "accuracy": 97.5,
    "seed": 3,
}


def trained(**options):
    """A tiny model whose every tensor, running statistics included, has moved from where it starts."""
    model = create_model(options.pop("name", TINY), **{"num_classes": 2, "in_channels": 1, **options})
    model.train()
    model(torch.randn(4, model.in_channels, 6, 6)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model


def rewrite(path, tensors=None, **metadata):
    """The file again with other tensors or raw metadata."""
    with safe_open(path, framework="pt") as file:
        header = {**file.metadata(), **metadata}
    safetensors.torch.save_file(safetensors.torch.load_file(path) if tensors is None else tensors, path, header)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.safetensors"
    model = trained()
    save_weights(path, model, METADATA)
    return path, model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head": "hidden", "nonlinearity": "linear", "padding_mode": "circular"},
        {"name": "recnet_60_480", "e": 1, "s": (2, 2), "d": (1, 2), "nonlinearity": "relu", "kernel_h": 1},
        {"nonlinearity": "shared_bn_relu", "recurrent": False, "in_channels": 3, "num_classes": 0},
    ],
    ids=str,
)
def test_round_trip(tmp_path, options):
    model = trained(**options).eval()
    save_weights(tmp_path / "w.safetensors", model, METADATA)
    loaded, metadata = load_weights(tmp_path / "w.safetensors")
    assert {k: metadata[k] for k in METADATA} == METADATA
    assert metadata["format"] == "recnets"
    assert metadata["parameters"] == sum(p.numel() for p in model.parameters())
    assert loaded.config == model.config
    assert not loaded.training
    assert list(loaded.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
    x = torch.randn(2, model.in_channels, 6, 6)
    assert torch.equal(loaded(x), model(x))


def test_metadata_is_json_that_other_tools_can_read(saved):
    path, _ = saved
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert header["format"] == "recnets"
    assert json.loads(header["accuracy"]) == 97.5
    assert json.loads(header["model"]) == {"name": TINY, "num_classes": 2, "in_channels": 1, "overrides": {}}
    assert read_metadata(str(path))["normalisation"] == METADATA["normalisation"]


def test_how_a_model_is_computed_is_not_stored(tmp_path):
    save_weights(tmp_path / "w.safetensors", trained(backend="torch", mode="concat"), {})
    assert read_metadata(tmp_path / "w.safetensors")["model"]["overrides"] == {}


def test_half_precision_storage_loads_as_float32(tmp_path):
    model = trained()
    save_weights(tmp_path / "w.safetensors", model, {}, dtype=torch.float16)
    stored = safetensors.torch.load_file(tmp_path / "w.safetensors")
    loaded, _ = load_weights(tmp_path / "w.safetensors")
    for name, tensor in model.state_dict().items():
        expected = tensor.half() if tensor.is_floating_point() else tensor
        assert torch.equal(stored[name], expected), name
        assert torch.equal(loaded.state_dict()[name], expected.to(tensor.dtype)), name
    with torch.no_grad():
        model.stem.conv.weight[0] = 1e6
    with pytest.raises(ValueError, match=r"stem.conv.weight holds 1e\+06, which is too large for torch.float16"):
        save_weights(tmp_path / "w.safetensors", model, {}, dtype=torch.float16)


def test_tied_overlapping_and_channels_last_tensors(tmp_path):
    model = trained(num_classes=6).to(memory_format=torch.channels_last)
    first, second = model.stages[0]
    second.crc.weight_h = first.crc.weight_h
    flat = torch.cat([first.transition.norm.weight.detach(), first.transition.norm.bias.detach()])
    first.transition.norm.weight.data, first.transition.norm.bias.data = flat.chunk(2)
    save_weights(tmp_path / "w.safetensors", model, {})
    loaded, _ = load_weights(tmp_path / "w.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_compiled_model_is_saved_as_the_model_inside(tmp_path):
    model = trained()
    save_weights(tmp_path / "w.safetensors", torch.compile(model, backend="eager"), METADATA)
    assert list(load_weights(tmp_path / "w.safetensors")[0].state_dict()) == list(model.state_dict())


def test_reset_classifier_before_saving(tmp_path):
    model = trained(num_classes=2)
    model.reset_classifier(5)
    save_weights(tmp_path / "w.safetensors", model, {"model": "what read_metadata gave for another"})
    loaded, metadata = load_weights(tmp_path / "w.safetensors")
    assert loaded.num_classes == metadata["model"]["num_classes"] == 5


def test_run_folder(saved, tmp_path):
    path, model = saved
    path.rename(tmp_path / "last.safetensors")
    loaded, _ = load_weights(tmp_path)
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)


def test_failed_save_keeps_the_old_file(saved):
    path, _ = saved
    before = path.read_bytes()
    with pytest.raises(TypeError, match="metadata must be JSON, 'when' is not"):
        save_weights(path, trained(), {"when": object()})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(RecNetsError, match="cannot write"):
        save_weights(path.parent / "absent" / "w.safetensors", trained(), {})


def test_one_name_for_each_class(saved):
    path, model = saved
    before = path.read_bytes()
    for classes in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match=rf"the metadata name {len(classes)} classes, .* has num_classes=2"):
            save_weights(path, model, {**METADATA, "classes": classes})
    for no_list in (2.5, {"0": "a", "1": "b"}):
        with pytest.raises(ValueError, match=r"the metadata's classes must be a list of names, got (2\.5|\{)"):
            save_weights(path, model, {**METADATA, "classes": no_list})
    assert path.read_bytes() == before
    rewrite(path, classes='["a"]')
    with pytest.raises(RecNetsError, match=r"contradicts itself: the metadata name 1 classes, .*num_classes=2"):
        load_weights(path)


def test_model_without_a_configuration(tmp_path):
    with pytest.raises(TypeError, match=r"Linear carries no ModelConfig.*create_model"):
        save_weights(tmp_path / "w.safetensors", torch.nn.Linear(2, 2), {})


# What can be wrong with a file.


def test_missing_path(tmp_path):
    with pytest.raises(RecNetsError, match=r"absent.safetensors' is neither a weights file nor a run folder"):
        load_weights(tmp_path / "absent.safetensors")


def test_folder_without_weights(tmp_path):
    with pytest.raises(RecNetsError, match=r"holds no last.safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip of pickles", b"\xff" * 64], ids=["empty", "zip", "noise"])
def test_not_safetensors(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(RecNetsError, match=r"w.safetensors is not a safetensors file, or it is cut short"):
        load_weights(path)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated(saved, keep):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RecNetsError, match="cut short or damaged"):
        load_weights(path)


def test_foreign_safetensors(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path, {"format": "pt"})
    with pytest.raises(RecNetsError, match="was not written by recnets: its metadata have format 'pt'"):
        load_weights(path)
    with pytest.raises(RecNetsError, match="was not written by recnets"):
        read_metadata(path)


@pytest.mark.parametrize("model", ["{}", "[1]", '{"name": "recnet_60_480", "colour": 1}', "null"])
def test_model_entry_that_says_nothing(saved, model):
    path, _ = saved
    rewrite(path, model=model)
    with pytest.raises(RecNetsError, match="does not say how to build its model"):
        load_weights(path)


def test_metadata_that_is_not_json(saved):
    path, _ = saved
    rewrite(path, accuracy="ninety")
    with pytest.raises(RecNetsError, match=r"metadata of .* are not JSON"):
        load_weights(path)


def test_keys_and_shapes_are_strict(saved):
    path, _ = saved
    tensors = safetensors.torch.load_file(path)
    moved = {("head.weight" if k == "classifier.weight" else k): t for k, t in tensors.items()}
    rewrite(path, moved)
    with pytest.raises(RecNetsError, match=r"misses classifier.weight; it has what the model lacks, head.weight$"):
        load_weights(path)
    rewrite(path, {**tensors, "classifier.bias": torch.zeros(7)})
    with pytest.raises(RecNetsError, match=r"wrong shape for classifier.bias \(\(7,\), expected \(2,\)\)"):
        load_weights(path)
    rewrite(path, {"stem.conv.weight": tensors["stem.conv.weight"]})
    with pytest.raises(RecNetsError, match=rf"and {len(tensors) - 5} more$"):
        load_weights(path)


# Published weights.


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of published weights: one architecture with one tag, one with two."""
    monkeypatch.setattr(weights, "PUBLISHED_FOLDER", tmp_path)
    small = {"e": 1, "s": (2, 2), "d": (1, 2)}
    models = {}
    for name, classes in [("recnet_60_480.cifar100", 7), ("recnet_60_640.cifar10", 3), ("recnet_60_640.cifar100", 7)]:
        models[name] = trained(name=name.split(".")[0], num_classes=classes, in_channels=3, **small)
        save_weights(tmp_path / f"{name}.safetensors", models[name], {"accuracy": 70.0}, dtype=torch.float16)
    return models


def same(a, b, names):
    return all(torch.equal(a.state_dict()[n], b.state_dict()[n].half().float()) for n in names)


@pytest.mark.parametrize("name", published())
def test_published_in_the_package(name):
    model, metadata = load_weights(name)
    assert model.config.name == name.split(".")[0]
    assert metadata["parameters"] == sum(p.numel() for p in model.parameters())
    assert {"recipe", "seed", "normalisation", "accuracy", "command", "commit"} <= set(metadata)
    assert len(metadata["classes"]) == model.num_classes
    stored = safetensors.torch.load_file(weights.PUBLISHED_FOLDER / f"{name}.safetensors")
    assert {t.dtype for t in stored.values() if t.is_floating_point()} == {torch.float16}


def test_published_files_stay_small_enough_to_come_with_the_package():
    assert sum(path.stat().st_size for path in weights.PUBLISHED_FOLDER.iterdir()) < 20e6


@pytest.mark.slow
@pytest.mark.parametrize("name", published())
def test_published_accuracy_is_what_recnet_eval_prints(name, capsys):
    """To the last image. Runs where the data set is: RECNETS_DATA names its folder."""
    try:
        load_dataset(read_metadata(name)["dataset"], download=False)
    except RecNetsError as error:
        pytest.skip(str(error))
    assert main(["eval", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == read_metadata(name)["accuracy"]


def test_published(shelf):
    assert published() == sorted(shelf)
    model, metadata = load_weights("recnet_60_480.cifar100")
    assert metadata["accuracy"] == 70.0
    assert model.num_classes == 7
    assert model.classifier.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["recnet_60_480.cifar100", "recnet_60_480", "RecNet-60-480", "RecNet-60-480.cifar100"])
def test_create_pretrained(shelf, name):
    model = create_model(name, pretrained=True)
    expected = shelf["recnet_60_480.cifar100"]
    parameters = [n for n, _ in expected.named_parameters()]
    assert same(model, expected, parameters)
    assert model.config == expected.config
    assert model.config.build().num_classes == 7


@pytest.mark.parametrize("num_classes", [0, 4])
def test_create_pretrained_for_other_classes(shelf, num_classes):
    model = create_model("recnet_60_480.cifar100", pretrained=True, num_classes=num_classes, backend="torch")
    features = [n for n, _ in model.named_parameters() if not n.startswith("classifier.")]
    assert same(model, shelf["recnet_60_480.cifar100"], features)
    assert model.num_classes == num_classes
    assert model(torch.zeros(1, 3, 4, 4)).shape[1] == (num_classes or model.num_features)


def test_tag_without_pretrained_is_the_untrained_architecture(shelf):
    model = create_model("recnet_60_480.cifar100", in_channels=1)
    assert (model.s, model.num_classes, model.in_channels) == ((2, 2), 7, 1)
    assert not torch.equal(model.classifier.weight, shelf["recnet_60_480.cifar100"].classifier.weight)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("recnet_60_640", {}, "several weights are published for 'recnet_60_640', choose one: .*cifar10, "),
        ("recnet_60_480.cifar1000", {}, "did you mean 'recnet_60_480.cifar100'"),
        ("recnet_90_640", {}, r"no weights are published for 'recnet_90_640'.*create_model\('recnet_90_640'\)"),
        ("recnet_61_480", {}, "unknown model 'recnet_61_480'; did you mean 'recnet_60_480'"),
        ("recnet_60_480", {"in_channels": 1}, "are for in_channels=3, got 1"),
    ],
)
def test_create_pretrained_refuses(shelf, name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, pretrained=True, **options)


def test_create_pretrained_refuses_another_shape(shelf):
    with pytest.raises(RecNetsError, match="does not fit the model"):
        create_model("recnet_60_480", pretrained=True, e=2)


def test_load_weights_suggests_published_names(shelf):
    with pytest.raises(RecNetsError, match=r"'recnet_60_480.cifar10' is neither .* did you mean 'recnet_60_480"):
        load_weights("recnet_60_480.cifar10")
