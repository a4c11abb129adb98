"""Trains two steps in a group of one, and writes what torch looks like in this process."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, ModuleType

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, dataloader

optimizer = sys.modules["torch.optim.optimizer"]
"""``torch.optim`` does not keep this name of its own."""


def origin(value: object) -> str:
    """Where a function was written; a wrapper may borrow a name, but not the place of its code."""
    if isinstance(value, ModuleType):
        return "module"
    code = getattr(value, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
    return f"{type(value).__name__} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')} {place}"


def attributes() -> dict[str, str]:
    """Every attribute of everything in torch that a recorder of DDP may want to touch."""
    owners = [
        torch,
        torch.autograd,
        torch.autograd.Variable._execution_engine,
        dist,
        dist.distributed_c10d,
        dist.ProcessGroup,
        torch._C._distributed_c10d.Reducer,
        torch._C._distributed_c10d.Work,
        dist.algorithms.join.Join,
        nn.Module,
        nn.parallel.distributed,
        DistributedDataParallel,
        nn.parallel.distributed._DDPJoinHook,
        DataLoader,
        dataloader,
        dataloader._BaseDataLoaderIter,
        dataloader._SingleProcessDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
        optim.Optimizer,
        optimizer,
        optim.SGD,
    ]
    found = {}
    for owner in owners:
        name = getattr(owner, "__name__", type(owner).__name__)
        for key in dir(owner):
            if not key.startswith("__"):
                found[f"{name}.{key}"] = origin(getattr(owner, key, None))
    return found


def train() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    sgd = optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2):
        sgd.zero_grad()
        model(batch).sum().backward()
        sgd.step()


def main() -> None:
    torch.set_num_threads(1)
    train()
    facts = {
        "attributes": attributes(),
        "optimizer_hooks": len(optimizer._global_optimizer_pre_hooks),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "ddpan"),
        "heavy": sorted({"polars", "pyarrow", "pyarrow.parquet"} & set(sys.modules)),
        "files": sorted(os.listdir(".")),
    }
    dist.destroy_process_group()
    Path(sys.argv[1], "facts-0.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
