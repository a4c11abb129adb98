"""The explicit way: start and stop around parts of a training, before and after the process group exists."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddpan import collector


class Copying(nn.Linear):
    """Its gradients are copied into the buckets."""


class Viewing(nn.Linear):
    """Its gradients are views of the buckets, and are kept from step to step."""


class Early(nn.Linear):
    """Recorded from the first step on."""


class Trainer:
    """A DDP model on given data."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        torch.manual_seed(0)
        self.viewing = kind is Viewing
        self.model = DistributedDataParallel(kind(16, 16), gradient_as_bucket_view=self.viewing)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=not self.viewing)
            self.model(torch.randn(4, 16)).square().sum().backward()
            self.optimizer.step()

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.module.weight
        return weight.detach().clone()


def replaceable() -> dict[str, int]:
    """Identities of the functions that the collector may replace."""
    owners = {"dist": dist, "c10d": dist.distributed_c10d, "ddp": DistributedDataParallel, "data": _BaseDataLoaderIter}
    functions = ((n, k, v) for n, owner in owners.items() for k, v in vars(owner).items() if callable(v))
    return {f"{name}.{key}": id(value) for name, key, value in functions}


def begin(name: str) -> None:
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{name}", **place)


def cycles(kind: type[nn.Linear], logs: str) -> bool:
    """Two recordings of one model, with unrecorded steps before, between and after; whether nothing has changed."""
    begin(f"{kind.__name__}-unrecorded")
    reference = Trainer(kind)
    reference.steps(15)
    dist.destroy_process_group()

    begin(f"{kind.__name__}-recorded")
    trainer = Trainer(kind)
    trainer.steps(2)
    collector.start(logs)
    collector.start(logs)
    trainer.steps(3)
    collector.stop()
    trainer.steps(4)
    collector.start(logs)
    trainer.steps(4)
    collector.stop()
    collector.stop()
    trainer.steps(2)
    # Gloo's threads may still be letting go of tensors; to destroy the group under them hangs torch now and then.
    time.sleep(0.05)
    dist.destroy_process_group()
    return torch.equal(trainer.weight, reference.weight)


def main() -> None:
    torch.set_num_threads(1)
    logs = sys.argv[2]
    rank = int(os.environ["RANK"])
    before = replaceable()
    same = {kind.__name__: cycles(kind, logs) for kind in (Copying, Viewing)}
    after = replaceable()

    collector.start(logs)
    begin("early")
    Trainer(Early).steps(5)
    collector.stop()
    dist.destroy_process_group()

    facts = {
        "changed": sorted(key for key in before if before[key] != after.get(key)),
        "threads": [thread.name for thread in threading.enumerate()],
        "same": same,
    }
    Path(sys.argv[1], f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
