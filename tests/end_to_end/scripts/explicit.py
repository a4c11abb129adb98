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


class Brief(nn.Linear):
    """The same, recorded for its first step only."""


class Early(nn.Linear):
    """Recorded from the first step on."""


class Trainer:
    """A DDP model on given data."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        torch.manual_seed(0)
        self.viewing = kind in (Viewing, Brief)
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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{name}", rank=rank, world_size=world_size)


def unrecorded(kind: type[nn.Linear], steps: int) -> torch.Tensor:
    """The weight after a training that is not recorded."""
    begin(f"{kind.__name__}-unrecorded")
    trainer = Trainer(kind)
    trainer.steps(steps)
    end()
    return trainer.weight


def end() -> None:
    # Gloo's threads may still be letting go of tensors; to destroy the group under them hangs torch now and then.
    time.sleep(0.05)
    dist.destroy_process_group()


def cycles(kind: type[nn.Linear], logs: str) -> bool:
    """Two recordings of one model, with unrecorded steps before, between and after; whether nothing has changed."""
    reference = unrecorded(kind, 15)
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
    end()
    return torch.equal(trainer.weight, reference)


def first_step_only(logs: str) -> bool:
    """A recording of one step at the beginning; whether nothing has changed."""
    reference = unrecorded(Brief, 8)
    begin("Brief-recorded")
    trainer = Trainer(Brief)
    collector.start(logs)
    trainer.steps(1)
    collector.stop()
    trainer.steps(7)
    end()
    return torch.equal(trainer.weight, reference)


def main() -> None:
    torch.set_num_threads(1)
    logs = sys.argv[2]
    rank = int(os.environ["RANK"])
    before = replaceable()
    same = {kind.__name__: cycles(kind, logs) for kind in (Copying, Viewing)}
    same["Brief"] = first_step_only(logs)
    after = replaceable()

    collector.start(logs)
    begin("early")
    Trainer(Early).steps(5)
    collector.stop()
    end()

    facts = {
        "changed": sorted(key for key in before if before[key] != after.get(key)),
        "threads": [thread.name for thread in threading.enumerate()],
        "same": same,
    }
    Path(sys.argv[1], f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
