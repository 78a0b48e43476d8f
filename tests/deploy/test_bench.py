"""`recnet bench` and the liveness of exported graphs."""

from __future__ import annotations

import csv

import pytest
import torch

from recnets.cli.bench import _model as named
from recnets.cli.main import main
from recnets.deploy.bench import has_openvino, plain, sizes
from recnets.deploy.export import size_limit
from recnets.deploy.int8 import to_int8
from recnets.deploy.liveness import multiply_adds, peak_bytes
from recnets.deploy.onnx import graph_of, to_onnx
from recnets.models import load_weights, save_weights
from recnets.models.profile import count_macs, count_parameters

onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
for _name in ("onnxscript", "onnxruntime"):
    pytest.importorskip(_name, reason="the extra 'export' is not installed")


def graph(nodes: list[tuple[str, list[str], str]]) -> bytes:
    """A graph on pictures "x" of 1×2×4×4 (128 bytes); "w" is a 1×1 convolution of two channels."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(torch.zeros(2, 2, 1, 1).numpy(), "w")
    ends = [helper.make_tensor_value_info(name, kind, ["batch", 2, 4, 4]) for name in ("x", nodes[-1][2])]
    made = [helper.make_node(kind_, inputs, [output]) for kind_, inputs, output in nodes]
    proto = helper.make_graph(made, "g", ends[:1], ends[1:], [weight])
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def test_liveness_by_hand():
    assert peak_bytes(graph([("Relu", ["x"], "a"), ("Relu", ["a"], "y")])) == 128  # both in place
    assert peak_bytes(graph([("Conv", ["x", "w"], "a"), ("Relu", ["a"], "y")])) == 256
    # x is read again at the end, so a and b cannot take its place; b is not added at once
    chain = [("Conv", ["x", "w"], "a"), ("Conv", ["a", "w"], "b"), ("Add", ["b", "x"], "y")]
    assert peak_bytes(graph(chain)) == 256  # b goes into x as it is added
    apart = [("Conv", ["x", "w"], "a"), ("Relu", ["x"], "b"), ("Add", ["a", "b"], "y")]
    assert peak_bytes(graph(apart)) == 256


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"head": "hidden", "kernel_h": 1}], ids=str)
def test_multiply_adds_of_a_file(trained, overrides):
    model = trained("RecNet(4, 4, 6)", **overrides)
    whole = count_macs(model, (8, 8))
    for way in ("stream", "concat"):
        assert multiply_adds(to_onnx(graph_of(model, way), 3, (8, 8), {})) == whole
    eight = multiply_adds(to_int8(model, torch.randn(2, 3, 8, 8), (8, 8), {}))
    assert eight == whole if not overrides else eight > whole  # there a smaller kernel is padded with zeros
    crc = model.stages[0][0].crc
    crc.norm.weight.data.view(6, 16)[2] = 0
    crc.norm.bias.data.view(6, 16)[2] = -1
    first = 64 * 16 * (9 * 4 + crc.weight_h[0].numel() + crc.weight_h[0].numel() + 24)
    assert multiply_adds(to_onnx(graph_of(model, "concat"), 3, (8, 8), {})) == whole - first


@pytest.mark.slow
def test_streaming_holds_less_than_concatenating(trained):
    """h (16 channels), the rest of x, the sum: no d·s_out wide map, whatever d."""
    model = trained("RecNet(4, 4, 6)")
    peaks = {way: peak_bytes(to_onnx(graph_of(model, way), 3, (8, 8), {})) for way in ("stream", "concat")}
    channel = 8 * 8 * 4
    assert peaks["concat"] >= 2 * 96 * channel  # the states and their concatenation
    assert peaks["stream"] <= (24 + 16 + 16 + 24) * channel


def test_plain_modules_compute_the_same(trained):
    model = trained(kernel_h=1)
    x = torch.randn(2, 3, 9, 11)
    with torch.no_grad():
        torch.testing.assert_close(plain(model)(x), model(x), rtol=1e-5, atol=1e-5)


def test_plain_modules_name_what_they_cannot_be(trained):
    with pytest.raises(ValueError, match="only the paper's recurrence"):
        plain(trained(nonlinearity="relu"))


@pytest.mark.slow
def test_command_writes_a_table_of_all_ways(trained, tmp_path, capsys):
    source, out = tmp_path / "net.safetensors", tmp_path / "bench.csv"
    save_weights(source, trained("RecNet(2, 4, 2)", dead=0.3), {})
    options = ["--repeats", "2", "--patience", "0", "--threads", "1", "--image-size", "8", "--out", str(out)]
    assert main(["bench", str(source), *options]) in (0, None)
    assert "times plain" in capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["way"] == "plain modules"
    assert float(rows[0]["times_plain"]) == 1.0
    assert all(float(row["median_ms"]) > 0 and row["torch"] and row["threads"] == "1" for row in rows)
    live = {row["way"]: int(row["live_bytes"]) for row in rows}
    assert 0 < live["ONNX 8 bits"] < live["ONNX stream"]
    assert live["ONNX squeezed"] <= live["ONNX concat"]


def test_names_as_info_takes_them(trained, tmp_path):
    save_weights(tmp_path / "last.safetensors", trained("RecNet(2, 4, 2)"), {})
    for name in ("recnet_60_480", "RecNet-60-480", "RecNet(4, 8, 8, 8, 5, 10, 15)", "recnet_60_480.cifar100"):
        assert count_parameters(named(name)) == 285_740
    assert named(str(tmp_path)).num_classes == 10


def test_wrong_use_is_noticed_before_the_work(tmp_path, capsys):
    for options, status, message in (
        (["--out", str(tmp_path / "absent" / "a.csv")], 1, "there is no folder"),
        (["--out", str(tmp_path / "absent" / "a.csv"), "--sizes"], 1, "there is no folder"),
        (["--patience", "-1"], 2, "patience must be at least 0, got -1"),
    ):
        assert main(["bench", "recnet_60_480", *options]) == status
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""


@pytest.mark.slow
def test_other_models_take_part(tmp_path, capsys):
    options = ["--repeats", "1", "--patience", "0", "--threads", "1", "--out", str(tmp_path)]
    assert main(["bench", "mobilenet", *options]) in (0, None)
    (out,) = tmp_path.glob("latency-cpu-1-threads-*-torch-*-onnxruntime-*.csv")
    with out.open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert {"plain modules", "optimized", "ONNX"} <= set(rows)
    assert int(rows["ONNX"]["live_bytes"]) > 0
    assert rows["ONNX"]["onnxruntime"]


@pytest.mark.slow
def test_published_files_are_as_small_as_promised(capsys):
    """Shared weights once: 1.15 times the weights and 100 KB in float32, 0.45 times that file in 8 bits."""
    model, _ = load_weights("recnet_60_480.cifar10_60ep")
    found = sizes(model)
    assert found.weights == 4 * sum(p.numel() for p in model.parameters())
    assert found.onnx <= size_limit(found.weights)
    assert found.int8 <= 0.45 * found.onnx
    if has_openvino():
        assert found.openvino <= size_limit(found.weights)
