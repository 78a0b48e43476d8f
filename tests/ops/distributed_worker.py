"""One of the processes that test_triton_distributed.py starts: python distributed_worker.py RANK WORLD FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recnets import RecNet


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    job = torch.load(folder / "job.pt")
    model = RecNet(**job["options"], backend="triton").to(job["device"])
    model.load_state_dict(job["state"])
    parallel = DistributedDataParallel(model)
    x, probe = (job[name].chunk(world)[rank].to(job["device"]) for name in ("x", "probe"))
    for _ in range(2):  # the second pass is where unused parameters would show
        parallel.zero_grad()
        (parallel(x) * probe).sum().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, folder / f"result{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
