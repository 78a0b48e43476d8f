"""The one place that decides which implementation runs a CRC layer.

"torch" runs anywhere. "triton" is the fused kernels, and raises where they cannot run, never falls back silently.
"auto" takes the kernels where they can run and plain PyTorch elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from recnets.ops import torch as plain
from recnets.ops.norm import Norm
from recnets.ops.torch import Recurrence

BACKENDS = ("auto", "torch", "triton")


def check_request(backend: str, r: Recurrence, kernel_x: int, kernel_h: int, s_out: int) -> None:
    """Refuse at construction what can never run: an explicit "triton" without a fused kernel for these settings."""
    if backend == "triton":
        raise ValueError("backend='triton' is not available in this version; use backend='auto' or 'torch'")


def crc(
    x: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    r: Recurrence,
    *,
    backend: str = "auto",
) -> Tensor:
    """All hidden states of a CRC layer, (N, d·s_in, H, W) -> (N, d·s_out, H, W)."""
    return plain.crc(x, weight_x, weight_h, bias, norm, r)
