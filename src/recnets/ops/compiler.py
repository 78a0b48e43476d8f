"""What looks on while the operations run."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Is torch.export looking on? PyTorch 2.11 has `torch.compiler.is_exporting()` true in torch.compile as well."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def traced() -> bool:
    """Is what runs recorded to run elsewhere, by torch.export or torch.jit.trace?"""
    return exporting() or torch.jit.is_tracing()
