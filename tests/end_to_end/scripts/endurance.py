"""A long training, recorded; it looks at its memory on the way. Arguments: folder, steps."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LOOKS = 10


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def look(step: int) -> dict[str, int]:
    gc.collect()
    return {"step": step, "resident_bytes": resident_bytes(), "python_blocks": sys.getallocatedblocks()}


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    looks = []
    for step in range(steps):
        if step % (steps // LOOKS) == 0:
            looks.append(look(step))
        optimizer.zero_grad()
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
    looks.append(look(steps))
    dist.destroy_process_group()
    Path(sys.argv[1], "facts-0.json").write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
