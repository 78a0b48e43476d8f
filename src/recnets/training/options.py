"""How a run is carried out, as opposed to what it trains: nothing here may change the resulting weights
beyond the rounding that another device or kernel brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recnets.ops.dispatch import BACKENDS
from recnets.utils import choose


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run."""

    data_dir: Path | None = None
    """Folder with the data sets; RECNETS_DATA, else a cache folder."""
    download: bool = True
    """Fetch a missing data set from its makers."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes a GPU if there is one."""
    backend: str = "auto"
    """Implementation of the recurrence: auto, torch or triton."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Replay each step as a CUDA graph; auto does on one GPU."""
    threads: int | None = None
    """CPU threads; all cores by default, one for batches of tiny images, which more would only slow down."""

    max_seconds: float | None = None
    """Stop after this long with a checkpoint and exit status 0."""
    epochs_until: int | None = None
    """Stop after this epoch of the full schedule, resumable."""
    checkpoint_seconds: float = 60.0
    """Write a checkpoint at least this often within an epoch; every epoch ends with one anyway."""
    checkpoint_steps: int | None = None
    """Write a checkpoint every so many steps as well."""
    check_steps: int = 50
    """Look at the loss every so many steps; in between the GPU is not waited for."""
    eval_every: int = 1
    """Evaluate every so many epochs (the last always)."""
    eval_batch: int = 1000
    """Images a batch in evaluation."""
    average_batches: int = 0
    """At the end evaluate once more, with BN's statistics averaged over so many batches of training images."""
    max_bad: float = 0.01
    """Largest share of unreadable pictures in a folder before training refuses to start."""
    tensorboard: bool = False
    """Also log to RUN/tensorboard (the extra of that name)."""
    report: bool = True
    """Write RUN/report.html at the end."""

    def __post_init__(self) -> None:
        choose(self.backend, BACKENDS, "backend")
        for name in ("threads", "epochs_until", "checkpoint_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("check_steps", "eval_every", "eval_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.average_batches < 0:
            raise ValueError(f"average_batches must be 0 or more, got {self.average_batches}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be greater than 0, got {self.max_seconds}")
        if self.checkpoint_seconds <= 0:
            raise ValueError(f"checkpoint_seconds must be greater than 0, got {self.checkpoint_seconds}")
        if not 0 <= self.max_bad <= 1:
            raise ValueError(f"max_bad is a share from 0 to 1, got {self.max_bad}")
