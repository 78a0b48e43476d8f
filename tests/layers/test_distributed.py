"""Two processes with half of a batch each, beside one process with the whole batch."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from recnets import RecNet
from recnets.layers import CRC, NONLINEARITIES, SyncBatchNorm1d, SyncBatchNorm2d, convert_sync_batchnorm

WORKER = Path(__file__).with_name("distributed_worker.py")
OPTIONS = {"e": 2, "s": (2, 1), "d": (2, 3), "num_classes": 3, "in_channels": 2, "head": "hidden"}
SIZES = [3, 2]
CASES = {
    "plain": {"sync": "", "options": OPTIONS},
    **{f"sync {n}": {"sync": "ours", "options": {**OPTIONS, "nonlinearity": n}} for n in NONLINEARITIES},
    "sync stream": {"sync": "ours", "options": {**OPTIONS, "mode": "stream"}},
    "sync grouped": {"sync": "ours", "options": {**OPTIONS, "recurrent": False}},
    # PyTorch's own conversion; its forward refuses the CPU, so without the hidden head, which calls it.
    "torch's sync": {"sync": "torch", "options": {**OPTIONS, "head": "linear"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, in_two_processes):
    """(job, models before, results of the two processes)."""
    folder = tmp_path_factory.mktemp("processes")
    torch.manual_seed(0)
    models = {case: RecNet(**settings["options"]).double() for case, settings in CASES.items()}
    job = {
        "cases": CASES,
        "sizes": SIZES,
        "x": torch.randn(5, 2, 4, 5, dtype=torch.float64),
        "probe": torch.randn(5, 3, dtype=torch.float64),
        "states": {case: model.state_dict() for case, model in models.items()},
    }
    torch.save(job, folder / "job.pt")
    return job, models, in_two_processes(WORKER, folder)


def compare(actual, expected, what):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c != "plain"])
def test_synchronised_norms_make_two_halves_one_batch(runs, case):
    """Outputs, gradients and running statistics, though the halves are of unequal size."""
    job, models, results = runs
    model = copy.deepcopy(models[case])
    for _ in range(2):
        model.zero_grad()
        out = model(job["x"])
        ((out * job["probe"]).sum() / 5).backward()
    compare(torch.cat([r[case]["out"] for r in results]), out.detach(), "output")
    for result in results:
        for name, p in model.named_parameters():
            compare(result[case]["gradients"][name], p.grad, f"gradient of {name}")
        for name, tensor in model.state_dict().items():
            compare(result[case]["state"][name], tensor, name)


@pytest.mark.slow
def test_data_parallel_without_synchronised_norms(runs):
    """Each process normalises its own share; gradients are the sum over shares, statistics those of process 0."""
    job, models, results = runs
    shares = [copy.deepcopy(models["plain"]) for _ in SIZES]
    for step in range(2):
        if step:  # DDP copies the buffers of process 0 before each pass
            for own, other in zip(shares[1].buffers(), shares[0].buffers(), strict=True):
                own.copy_(other)
        for i, model in enumerate(shares):
            model.zero_grad()
            out = model(job["x"].split(SIZES)[i])
            ((out * job["probe"].split(SIZES)[i]).sum() / 5).backward()
            if step:
                compare(results[i]["plain"]["out"], out.detach(), f"output of process {i}")
    for (name, p), q in zip(shares[0].named_parameters(), shares[1].parameters(), strict=True):
        for result in results:
            compare(result["plain"]["gradients"][name], p.grad + q.grad, f"gradient of {name}")
    for name, tensor in shares[0].state_dict().items():
        compare(results[0]["plain"]["state"][name], tensor, name)


def test_conversion_keeps_parameters_buffers_and_mode():
    model = RecNet(**OPTIONS)
    model.stem.norm.eval()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    modes = {name: m.training for name, m in model.named_modules()}
    assert convert_sync_batchnorm(model) is model
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert {name: m.training for name, m in model.named_modules()} == modes
    kinds = {type(m) for m in model.modules()}
    assert {SyncBatchNorm1d, SyncBatchNorm2d} <= kinds
    assert not {nn.BatchNorm1d, nn.BatchNorm2d} & kinds
    norm = model.stem.norm
    convert_sync_batchnorm(model)
    assert model.stem.norm is norm


def test_conversion_keeps_settings():
    norm = convert_sync_batchnorm(nn.BatchNorm2d(3, eps=0.1, momentum=0.3, affine=False, track_running_stats=False))
    assert isinstance(norm, SyncBatchNorm2d)
    assert (norm.eps, norm.momentum, norm.affine, norm.track_running_stats) == (0.1, 0.3, False, False)
    assert norm.running_mean is None


@pytest.mark.parametrize("training", [False, True])
def test_one_process_needs_no_group(training):
    """Without a process group the synchronised norms are the plain ones."""
    plain = RecNet(**OPTIONS).double().train(training)
    sync = convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    compare(sync(x), plain(x), "output")
    for name, tensor in plain.state_dict().items():
        compare(sync.state_dict()[name], tensor, name)
    layer = convert_sync_batchnorm(CRC(2, 3, 2))
    assert isinstance(layer.norm, SyncBatchNorm2d)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)])
def test_one_dimensional(shape):
    x = torch.randn(shape)
    plain, sync = nn.BatchNorm1d(3), SyncBatchNorm1d(3)
    torch.testing.assert_close(sync(x), plain(x))
    torch.testing.assert_close(sync.running_var, plain.running_var)
