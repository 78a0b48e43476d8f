"""One of the processes that test_distributed.py starts: python distributed_worker.py RANK WORLD FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recnets import RecNet
from recnets.layers import convert_sync_batchnorm


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    job = torch.load(folder / "job.pt")
    results = {}
    for case, settings in job["cases"].items():
        model = RecNet(**settings["options"]).double()
        model.load_state_dict(job["states"][case])
        if settings["sync"] == "ours":
            model = convert_sync_batchnorm(model)
        parallel = DistributedDataParallel(model)
        if settings["sync"] == "torch":  # after wrapping: DDP refuses it on the CPU; parameters and buffers stay
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        x, probe = (job[name].split(job["sizes"])[rank] for name in ("x", "probe"))
        for _ in range(2):  # the second pass is where unused parameters and clashing buffers would show
            parallel.zero_grad()
            out = parallel(x)
            # DDP takes the mean over processes; unequal shares weigh by their pictures.
            ((out * probe).sum() * world / job["x"].shape[0]).backward()
        results[case] = {
            "out": out.detach(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "state": model.state_dict(),
        }
    torch.save(results, folder / f"result{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
