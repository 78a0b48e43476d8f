"""Exported files: the same answers in their own runtimes, shared weights stored once, nothing half-written."""

from __future__ import annotations

import json

import pytest
import torch

from recnets.cli.main import main
from recnets.deploy import export, squeeze
from recnets.deploy.export import check, size_limit
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
    assert {p.key: json.loads(p.value) for p in proto.metadata_props} == {"recnets": {"classes": ["a", "b"]}}
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
def test_command(trained, onnx, tmp_path, capsys):
    source, out = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    save_weights(source, trained("RecNet(2, 4, 2)"), {"image_size": [8, 8]})
    assert main(["export", str(source), "--out", str(out)]) in (0, None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "top-1 agreement 100 %" in printed
    assert "transition: stream" in printed or "transition: concat" in printed
    assert out.exists()


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
