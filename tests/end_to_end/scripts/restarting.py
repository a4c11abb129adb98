"""A training whose rank 1 is killed after three of six steps, at the first attempt; the next goes on from there."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def main() -> None:
    out = Path(sys.argv[1])
    checkpoint = out / "checkpoint.pt"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    begin = 0
    if checkpoint.exists():
        loaded = torch.load(checkpoint)
        net.load_state_dict(loaded["weights"])
        begin = loaded["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, STEPS):
        torch.manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save({"weights": net.state_dict(), "step": step + 1}, checkpoint)
        dist.barrier()
        if step == 2 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save(net.state_dict(), out / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
