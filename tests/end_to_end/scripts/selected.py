"""A training for `DDPAN_STEPS`: beside DDP, collectives on its group and on another one, each of another size.

Rank r trains for ``STEPS`` + r steps; those that are through join the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 14


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0005, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        dist.all_reduce(torch.ones(100 + step))
        if rank < 2:
            dist.all_reduce(torch.ones(200 + step), group=pair)
        optimizer.step()
        dist.broadcast(torch.ones(300 + step), 0)
    with model.join():
        for _ in range(rank):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    dist.barrier()
    content = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    facts = {"hash": hashlib.sha256(content).hexdigest()}
    Path(sys.argv[1], f"facts-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
