"""ExecuTorch files: the same answers in its runtime for every batch up to the largest, shared weights stored once."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from recnets.cli.main import main
from recnets.deploy import export, squeeze
from recnets.deploy.executorch import LARGEST_BATCH, Session, batches
from recnets.deploy.onnx import faster
from recnets.errors import RecNetsError
from recnets.layers import CRC
from recnets.models import save_weights


@pytest.fixture
def executorch():
    return pytest.importorskip("executorch.exir", reason="the extra 'executorch' is not installed")


@pytest.mark.slow
def test_batches_up_to_the_largest(trained, executorch, tmp_path):
    model = trained("RecNet(4, 8, 3)")  # three uses of W_x, two of W_h, in each of two modules
    out = tmp_path / "net.pte"
    options = {"format": "executorch", "transition": "stream", "image_size": 8, "max_batch": 8}
    made = export(model, out, metadata={"classes": ["a", "b"]}, **options)
    assert made.agreement == 1.0
    assert made.batches == (1, 2, 7, 8)
    assert made.file_bytes == out.stat().st_size
    # A second copy of every W_x and W_h would not fit in what the file has beside the weights.
    shared = 4 * sum(m.weight_x.numel() + m.weight_h.numel() for m in model.modules() if isinstance(m, CRC))
    assert made.file_bytes - made.weight_bytes < shared
    session = Session(out)
    assert session.about() == {"classes": ["a", "b"], "image_size": [8, 8]}
    for batch in (3, 1, 8):  # smaller after larger, and back
        x = torch.randn(batch, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(session(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RecNetsError, match="fails for a batch of 9"):
        session(torch.randn(9, 3, 8, 8))


@pytest.mark.slow
def test_squeezed_for_single_pictures(trained, executorch, tmp_path):
    small = squeeze(trained("RecNet(2, 4, 2)", dead=0.3), 0.0)
    options = {"format": "executorch", "transition": "concat", "image_size": 8, "max_batch": 1}
    made = export(small, tmp_path / "net.pte", **options)
    assert made.agreement == 1.0
    assert made.batches == (1,)


@pytest.mark.slow
def test_command(trained, executorch, tmp_path, capfd):
    source, out = tmp_path / "net.safetensors", tmp_path / "net.pte"
    save_weights(source, trained("RecNet(1, 2, 2)"), {"image_size": [8, 8]})
    line = ["export", str(source), "--format", "executorch", "--out", str(out), "--max-batch", "3"]
    assert main([*line, "--transition", "concat"]) == 0
    said = capfd.readouterr()
    printed = " ".join(said.out.split())
    assert "batches of 1, 2 and 3 beside PyTorch" in printed
    assert "top-1 agreement 100 %" in printed
    assert "cpuinfo" not in said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.pte", "net.safetensors"]


def test_not_a_file_of_executorch(executorch):
    with pytest.raises(RecNetsError, match="ExecuTorch cannot load the file"):
        Session(b"no program" * 100)


def test_the_faster_one_is_taken():
    def slow(x):
        time.sleep(0.002)
        return x

    assert faster({"slow": slow, "quick": torch.relu}, torch.zeros(1)) == "quick"
    assert faster({"quick": torch.relu, "slow": slow}, torch.zeros(1)) == "quick"


def test_which_batches_are_checked():
    assert batches(1) == (1,)
    assert batches(2) == (1, 2)
    assert batches(15) == (1, 2, 7, 15)


@pytest.mark.parametrize("batch", [0, LARGEST_BATCH + 1])
def test_largest_batch_is_named(trained, tmp_path, batch):
    with pytest.raises(ValueError, match=f"must be 1 to {LARGEST_BATCH}, got {batch}"):
        export(trained(), tmp_path / "net.pte", format="executorch", max_batch=batch)


def test_without_the_extra(trained, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "executorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(RecNetsError, match=r"pip install 'recnets\[executorch\]'"):
        export(trained(), tmp_path / "net.pte", format="executorch", transition="stream")
    assert not list(tmp_path.iterdir())
