"""A training that knows nothing of the collector; it times itself, so that the log can be compared."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 12
BATCH = 4


class Slow(Dataset[torch.Tensor]):
    """Each sample takes 2 ms."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError(index)
        time.sleep(0.002)
        return torch.randn(32)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        time.sleep(0.004)
        x = torch.relu(self.middle(x))
        result: torch.Tensor = self.last(x)
        return result


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Plain(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moments = []
    batches = iter(DataLoader(Slow(), batch_size=BATCH))
    for _ in range(STEPS):
        times = [time.time_ns()]
        batch = next(batches)
        times.append(time.time_ns())
        optimizer.zero_grad()
        times.append(time.time_ns())
        output = model(batch)
        times.append(time.time_ns())
        output.square().mean().backward()
        times.append(time.time_ns())
        optimizer.step()
        times.append(time.time_ns())
        moments.append(times)
    told = model._get_ddp_logging_data()
    kinds = ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "bucket_cap_bytes")
    facts = {
        "moments": moments,
        "logger": {kind: told[kind] for kind in kinds},
        "names": [name for name, _ in model.module.named_parameters()],
        "parameter_bytes": sum(p.nbytes for p in model.parameters()),
    }
    Path(sys.argv[1], f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
