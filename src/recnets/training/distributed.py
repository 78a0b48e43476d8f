"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recnets.errors import Misuse, RecNetsError
from recnets.training.progress import counted


@dataclass(frozen=True)
class Processes:
    """This process among `world`. With one process every method is the identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """The one process that writes."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, values: list[int], device: torch.device) -> list[int]:
        """Element-wise maximum over processes."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [int(v) for v in tensor.tolist()]

    def from_main(self, value: Any) -> Any:
        """The main process's value, everywhere."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def copy_from_main(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with the main process's."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Until all have come here."""
        if self.world > 1:
            dist.barrier()


def join_processes(device: str) -> Processes:
    """Join the group of `torchrun --nproc_per_node N -m recnets train …`; alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world <= 1:
        return Processes()
    if not dist.is_available():
        raise RecNetsError("this build of torch has no torch.distributed; run without torchrun")
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cuda:
        if local_rank >= torch.cuda.device_count():
            raise RecNetsError(
                f"process {local_rank} of this machine has no GPU of its own: {torch.cuda.device_count()} are here; "
                "start as many processes as there are GPUs, or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_cuda else "gloo")
    return Processes(dist.get_rank(), world, local_rank)


def leave_processes(processes: Processes) -> None:
    """End the group that `join_processes` joined."""
    if processes.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def choose_device(name: str, processes: Processes) -> torch.device:
    """`auto` is a GPU if there is one; a device that cannot be used is an error that says so."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", processes.local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = _device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RecNetsError(f"--device {name}: torch {torch.__version__} sees no CUDA device here")
        if processes.world > 1 or device.index is None:
            return torch.device("cuda", processes.local_rank)
        if device.index >= torch.cuda.device_count():
            raise RecNetsError(f"--device {name}: there are only {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RecNetsError(f"--device {name}: torch {torch.__version__} sees no MPS device here")
    return device


def _device(name: str) -> torch.device:
    with contextlib.suppress(RuntimeError):  # torch's, for a name it does not know
        device = torch.device(name)
        if device.type in ("cpu", "cuda", "mps"):
            return device
    raise Misuse(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")


def device_name(device: torch.device) -> str:
    """For people: "NVIDIA H200", "cpu (2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({counted(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else device.type
