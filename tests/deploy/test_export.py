"""Exported files: the same answers in their own runtimes, shared weights stored once, nothing half-written."""

from __future__ import annotations

import json

import pytest
import torch

from recnets import create_model
from recnets.cli.main import main
from recnets.deploy import export, openvino, optimize, squeeze
from recnets.deploy.export import SUFFIXES, check, size_limit
from recnets.deploy.onnx import graph_of
from recnets.deploy.unrolled import SCALES, TRANSITIONS, Unrolled
from recnets.errors import RecNetsError
from recnets.models import save_weights

NO_ONNX = "the extra 'export' (onnx, onnxscript, onnxruntime) is not installed"


@pytest.fixture
def onnx():
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=NO_ONNX)
    return pytest.importorskip("onnx", reason=NO_ONNX)


VARIANTS = [
    {},
    {"head": "hidden"},
    {"nonlinearity": "relu"},
    {"nonlinearity": "shared_bn_relu"},
    {"kernel_x": 1, "padding_mode": "replicate"},
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dead", [0.0, 0.5])
def test_unrolled_computes_the_same(trained, overrides, transition, scale, dead):
    model = trained(dead=dead, **overrides)
    small = squeeze(model, 0.0) if dead else model
    check(model, Unrolled(small, transition, scale), (9, 11))


@pytest.mark.parametrize("overrides", [{"nonlinearity": "linear"}, {"recurrent": False}], ids=str)
def test_variants_that_have_no_step_to_fold_are_named(trained, overrides):
    with pytest.raises(ValueError, match="this one has nonlinearity="):
        Unrolled(trained(**overrides), "stream", "weights")


@pytest.mark.slow
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_onnx_holds_shared_weights_once(trained, onnx, tmp_path, transition):
    model = trained("RecNet(4, 8, 4)")  # four uses of W_x, three of W_h, in each of two modules
    made = export(model, tmp_path / "net.onnx", transition=transition, image_size=8, metadata={"classes": ["a", "b"]})
    assert made.agreement == 1.0
    assert made.transition == transition
    assert made.file_bytes == (tmp_path / "net.onnx").stat().st_size <= size_limit(made.weight_bytes)
    proto = onnx.load(tmp_path / "net.onnx")
    onnx.checker.check_model(proto)
    held = sum(onnx.numpy_helper.to_array(t).size for t in proto.graph.initializer)
    assert held <= 1.05 * made.weight_bytes / 4
    about = {"classes": ["a", "b"], "image_size": [8, 8]}
    assert {p.key: json.loads(p.value) for p in proto.metadata_props} == {"recnets": about}
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    assert {node.op_type for node in proto.graph.node}.isdisjoint({"SplitToSequence", "ScatterElements", "Loop"})
    wide = [node for node in proto.graph.node if node.op_type == "Concat"]
    assert bool(wide) == (transition == "concat")


@pytest.mark.slow
def test_squeezed_exports(trained, onnx, tmp_path):
    model = trained("RecNet(2, 4, 3)", dead=0.3)
    made = export(squeeze(model, 0.0), tmp_path / "net.onnx", transition="stream", image_size=8)
    assert made.agreement == 1.0


@pytest.mark.slow
def test_openvino(trained, onnx, tmp_path):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    made = export(trained("RecNet(4, 8, 4)"), tmp_path / "net.xml", format="openvino", image_size=8)
    assert made.agreement == 1.0
    assert (tmp_path / "net.bin").stat().st_size <= 1.05 * made.weight_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.bin", "net.xml"]


@pytest.mark.slow
def test_openvino_that_disagrees_leaves_the_old_files(trained, onnx, tmp_path, monkeypatch):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    old = {name: tmp_path / name for name in ("net.xml", "net.bin")}
    for path in old.values():
        path.write_text("old")
    monkeypatch.setattr(openvino.Session, "__call__", lambda self, x: torch.zeros(len(x), 10) + 1e3)
    with pytest.raises(RecNetsError, match="differs from PyTorch by"):
        export(trained("RecNet(2, 4, 2)"), old["net.xml"], format="openvino", transition="stream", image_size=8)
    assert [path.read_text() for path in old.values()] == ["old", "old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.bin", "net.xml"]


@pytest.mark.parametrize("old", [True, False])
def test_a_pair_that_cannot_be_replaced_stays(tmp_path, old):
    """The graph's place is taken by a folder, so the second of the two renames fails."""
    made, out = tmp_path / "made" / "net.xml", tmp_path / "net.xml"
    for folder in (made.parent, out):
        folder.mkdir()
    made.write_text("new")
    made.with_suffix(".bin").write_text("new")
    if old:
        out.with_suffix(".bin").write_text("old")
    with pytest.raises(OSError, match=r"net\.xml"):
        openvino._replace(made, out)
    assert out.with_suffix(".bin").exists() == old
    assert not old or out.with_suffix(".bin").read_text() == "old"


def in_training(model):
    """In training mode but for one module, partly frozen, with a hook."""
    model.train()
    model.stages[0][1].eval()
    model.stem.requires_grad_(False)
    model.classifier.register_forward_hook(lambda module, args, out: None)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_the_model_stays_as_it_is(trained, onnx, tmp_path, snapshot, format):
    if format == "openvino":
        pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    model = in_training(squeeze(trained("RecNet(2, 4, 2)", dead=0.3), 0.0))
    before = snapshot(model)
    export(model, tmp_path / f"net{SUFFIXES[format]}", format=format, transition="stream", image_size=8)
    assert snapshot(model) == before


def test_writing_a_model_down_leaves_it_as_it_is(trained, snapshot):
    model = trained()
    x = torch.randn(2, 3, 9, 11)
    with torch.no_grad():
        expected = model(x)
    in_training(model)
    before = snapshot(model)
    with torch.no_grad():
        torch.testing.assert_close(Unrolled(model, "concat", "weights")(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(optimize(model, mode="stream", image_size=8)(x), expected, rtol=1e-5, atol=1e-5)
    assert snapshot(model) == before
    other = create_model("mobilenet").train()
    assert not graph_of(other, "").training
    assert all(module.training for module in other.modules())
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_pictures_that_are_too_small(trained, tmp_path, capsys):
    model = trained()
    for size in (1, (8, 2)):
        with pytest.raises(ValueError, match="needs at least 4×4 pixels, got"):
            export(model, tmp_path / "net.onnx", image_size=size)
        with pytest.raises(ValueError, match="needs at least 4×4 pixels, got"):
            optimize(model, image_size=size)
    source = tmp_path / "net.safetensors"
    save_weights(source, model, {})
    for command in (["export", str(source), "--out", str(tmp_path / "q.onnx")], ["bench", str(source)]):
        assert main([*command, "--image-size", "2"]) == 2
        error = capsys.readouterr().err
        assert "needs at least 4×4 pixels, got 2×2" in error
        assert error.count("\n") == 1


def test_the_folder_is_looked_at_first(trained, tmp_path, capsys):
    source = tmp_path / "net.safetensors"
    save_weights(source, trained(), {})
    for format in ("onnx", "onnx-int8", "openvino"):
        out = tmp_path / "absent" / f"net{SUFFIXES[format]}"
        assert main(["export", str(source), "--format", format, "--out", str(out)]) == 1
        assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_command(trained, onnx, tmp_path, capsys):
    folder = tmp_path / ("a folder [with] a long name " * 4)
    folder.mkdir()
    source, out = tmp_path / "net.safetensors", folder / "net.onnx"
    save_weights(source, trained("RecNet(2, 4, 2)"), {"image_size": [8, 8]})
    assert main(["export", str(source), "--out", str(out)]) in (0, None)
    first, _, work, beside = capsys.readouterr().out.splitlines()  # no line is wrapped
    assert first in (f"wrote {out}, transition: stream", f"wrote {out}, transition: concat")
    assert work.endswith("million multiply-adds a picture")
    assert beside.endswith("top-1 agreement 100 %")
    assert out.exists()


def test_the_file_tells_its_own_size(trained, onnx, tmp_path):
    """Not that of training: whoever prepares pictures for the file goes by it."""
    model, known = trained("RecNet(2, 4, 2)"), {"accuracy": 90.0, "dataset": "digits"}
    for size, expected in ((8, {**known, "image_size": [8, 8]}), ((6, 9), {"dataset": "digits", "image_size": [6, 9]})):
        metadata = {**known, "image_size": [8, 8]}
        export(model, tmp_path / "net.onnx", transition="concat", image_size=size, metadata=metadata)
        proto = onnx.load(tmp_path / "net.onnx")
        assert json.loads(proto.metadata_props[0].value) == expected
        shape = proto.graph.input[0].type.tensor_type.shape
        assert [side.dim_value for side in shape.dim[2:]] == expected["image_size"]


@pytest.mark.parametrize("words", [["--image-size", "6"], ["--transition", "stream"]])
def test_what_8_bit_files_are_not_made_for_is_refused(trained, tmp_path, capsys, words):
    source = tmp_path / "net.safetensors"
    save_weights(source, trained("RecNet(2, 4, 2)"), {"image_size": [8, 8], "dataset": "digits"})
    assert main(["export", str(source), "--format", "onnx-int8", "--out", str(tmp_path / "net.onnx"), *words]) == 2
    assert f"leave {' '.join(words)} away" in capsys.readouterr().err


def test_a_file_that_disagrees_is_refused(trained):
    model = trained("RecNet(2, 4, 2)")
    with pytest.raises(RecNetsError, match="differs from PyTorch by"):
        check(model, lambda x: model(x).detach() + 1, (8, 8))
    with pytest.raises(RecNetsError, match="for a batch of 1, expected"):
        check(model, lambda x: torch.zeros(1, 3), (8, 8))


def test_names_what_a_format_is_called(trained, tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.onnx, got 'net.pt'"):
        export(trained(), tmp_path / "net.pt")
    with pytest.raises(ValueError, match="format must be one of"):
        export(trained(), tmp_path / "net.onnx", format="onix")
