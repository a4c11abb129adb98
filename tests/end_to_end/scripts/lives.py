"""Several trainings in one process, each in a process group of its own: accumulation, evaluation and more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Accumulating(nn.Linear):
    """The module's name in the log tells the trainings apart."""


class Evaluated(nn.Linear):
    """As above."""


class Collecting(nn.Linear):
    """As above."""


class Interleaved(nn.Linear):
    """As above."""


def accumulate() -> None:
    """Three steps of four micro-batches."""
    model = DistributedDataParallel(Accumulating(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        for micro_batch in range(4):
            with model.no_sync() if micro_batch < 3 else nullcontext():
                model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def evaluate() -> None:
    """Four steps with an evaluation pass after each, in evaluation mode and not, with and without inference mode."""
    model = DistributedDataParallel(Evaluated(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        model.train(step % 2 == 0)
        with torch.no_grad() if step < 2 else torch.inference_mode():
            model(torch.randn(2, 8))
        model.train()


def collect() -> None:
    """Collectives of the user's own, on the default group of three, on a pair, and on one rank alone."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    alone = dist.new_group([0])
    model = DistributedDataParallel(Collecting(8, 8))
    for _ in range(4):
        model(torch.randn(2, 8)).sum().backward()
        total = torch.ones(10)
        dist.all_reduce(total)
        assert total[0] == 3
        dist.broadcast(torch.ones(3, dtype=torch.float64), src=0)
        if rank < 2:
            dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=pair)
        work = dist.all_reduce(torch.ones(20), async_op=True)
        assert work is not None
        work.wait()
        if rank == 0:
            dist.all_reduce(torch.ones(7), group=alone)
        if rank == 0:
            dist.send(torch.ones(6), dst=1)
        elif rank == 1:
            dist.recv(torch.ones(6), src=0)
    # Ranks outside a group get a warning of torch's and no collective.
    dist.all_reduce(torch.ones(7), group=alone)
    dist.barrier()


def interleave() -> None:
    """Two modules of one shape; each forward of the second comes after one of the first that has no backward."""
    first, second = (DistributedDataParallel(Interleaved(8, 8)) for _ in range(2))
    x = torch.randn(2, 8)
    for _ in range(3):
        first(x)
        second(x).sum().backward()
    first(x).sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    modes: list[Callable[[], None]] = [accumulate, evaluate, collect, interleave]
    for mode in modes:
        dist.init_process_group(
            "gloo", init_method=f"file://{sys.argv[1]}/{mode.__name__}", rank=rank, world_size=world_size
        )
        mode()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
