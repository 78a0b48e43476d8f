"""What a precision means: the type of autocast, and whether products of fp32 may be shorter."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Half precision inside, where that is asked for."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """PyTorch's own default would be tf32 for convolutions."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
