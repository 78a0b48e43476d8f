"""The choice of an implementation: what is asked for by name runs or raises."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from recnets.layers import CRC

REFUSED = """
import recnets
for build in (lambda: recnets.CRC(2, 3, 2, backend="triton"), lambda: recnets.RecNet(2, (2,), (2,), backend="triton")):
    try:
        build()
    except ValueError as error:
        print(error)
"""


def test_triton_is_refused_at_construction_where_it_cannot_run():
    hidden = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", REFUSED], env=hidden, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            "backend='triton' cannot run here: the kernels need the package 'triton' and a CUDA device"
        )
        assert line.endswith("use backend='auto' or 'torch'")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recurrent": False}, "recurrent=False"),
        ({"padding_mode": "circular"}, "padding_mode='circular'"),
        ({"kernel_x": 5}, "kernel_x=5"),
    ],
)
def test_triton_is_refused_for_settings_without_a_kernel(options, reason):
    with pytest.raises(ValueError, match=rf"backend='triton' cannot run here: .*{reason}"):
        CRC(2, 3, 2, backend="triton", **options)


def test_auto_runs_anywhere_and_agrees_with_torch():
    auto, plain = CRC(2, 3, 2, backend="auto"), CRC(2, 3, 2, backend="torch")
    plain.load_state_dict(auto.state_dict())
    x = torch.randn(2, 4, 5, 3)
    for training in (True, False):
        assert torch.equal(auto.train(training)(x), plain.train(training)(x))


@pytest.mark.parametrize(
    ("properties", "capability", "expected"),
    [
        ({"shared_memory_per_block_optin": 232448, "shared_memory_per_block": 49152}, (9, 0), (232448, 3)),
        ({"shared_memory_per_block_optin": 101376, "shared_memory_per_block": 49152}, (8, 9), (101376, 3)),
        ({"shared_memory_per_block_optin": 101376, "shared_memory_per_block": 49152}, (12, 0), (101376, 2)),
        ({"shared_memory_per_block_optin": 0, "shared_memory_per_block": 65536}, (7, 5), (65536, 2)),
        ({}, (7, 5), (65536, 2)),
    ],
)
def test_tiles_on_their_way_are_as_many_as_shared_memory_holds(properties, capability, expected, monkeypatch):
    tiles = pytest.importorskip("recnets.ops.triton.tiles")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for function in (tiles.shared_memory, tiles.reads_shared_memory):
        monkeypatch.setattr(tiles, function.__name__, function.__wrapped__)  # no answer is remembered
    device = torch.device("cuda", 0)
    assert (tiles.shared_memory(device), tiles.stages(3, 64, 32, 128, device, 4)) == expected
    assert tiles.stages(2, 64, 32, 16, device, 2) == 2
    assert tiles.stages(3, 256, 256, 128, device, 4) == 1
    assert tiles.stages(3, 256, 256, 128, torch.device("cpu"), 4) == 3
