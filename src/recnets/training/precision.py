"""What a precision means: the type of autocast, and whether products of fp32 may be shorter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Half precision inside, where that is asked for."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """From here on. PyTorch's own default would be tf32 for convolutions."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextlib.contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """In this precision inside, tf32 included; as before afterwards."""
    if device.type != "cuda":
        with autocast(precision, device):
            yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32(precision, device)
    try:
        with autocast(precision, device):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
