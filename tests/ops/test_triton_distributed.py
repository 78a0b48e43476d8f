"""The fused layer under DistributedDataParallel: two processes, on one GPU or in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from recnets import RecNet
from recnets.ops import dispatch

WORKER = Path(__file__).with_name("distributed_worker.py")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes its time.
OPTIONS = {"e": 2, "s": (4, 8), "d": (2, 3), "num_classes": 3} if DEVICE == "cuda" else {"e": 1, "s": (4,), "d": (2,)}
SIDE = 8 if DEVICE == "cuda" else 4


@pytest.mark.slow
@pytest.mark.skipif(not dispatch.AVAILABLE, reason="needs the package 'triton'")
def test_gradients_are_the_mean_over_processes(tmp_path, rms, in_two_processes, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    plain = RecNet(**OPTIONS, backend="torch").to(DEVICE)
    x = torch.randn(4, 3, SIDE, SIDE)
    probe = torch.randn(4, plain.num_classes)
    job = {"options": OPTIONS, "state": plain.state_dict(), "device": DEVICE, "x": x, "probe": probe}
    torch.save(job, tmp_path / "job.pt")
    for part, weights in zip(x.chunk(2), probe.chunk(2), strict=True):
        (plain(part.to(DEVICE)) * weights.to(DEVICE)).sum().backward()
    results = in_two_processes(WORKER, tmp_path)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        for result in results:
            assert rms(result[name], parameter.grad.cpu() / 2) < 1e-4, name
