"""Two by two ranks: layers split over two ranks by hand, DDP over the two that hold the same part, one rank slow."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
BATCH = 8
BLOCKS = 2
DEVICE_SECONDS = 0.004
DELAY_SECONDS = 0.04
SLOW_RANK = 3
LATE_GROUP = [0, 3]
LATE_FROM = 5
"""The step before which a further group is made."""


class Copied(torch.autograd.Function):
    """An input that every part of a split layer gets: its gradient is the sum over the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        if dist.get_rank() == SLOW_RANK:
            time.sleep(DELAY_SECONDS / BLOCKS)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum of what the parts of a split layer put out."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class SplitBlock(nn.Module):
    """Half the columns of one layer, and the same half of the rows of the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.columns = nn.Linear(WIDTH, 2 * WIDTH)
        self.rows = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied: torch.Tensor = Copied.apply(x, self.group)  # type: ignore[no-untyped-call]
        part = self.rows(torch.relu(self.columns(copied)))
        summed: torch.Tensor = Summed.apply(part, self.group)  # type: ignore[no-untyped-call]
        return summed


def new_groups(of: list[list[int]]) -> dist.ProcessGroup:
    """Make all of the groups, as every rank has to; the one that this rank is in."""
    made = [dist.new_group(ranks) for ranks in of]
    own: dist.ProcessGroup = next(group for group, ranks in zip(made, of, strict=True) if dist.get_rank() in ranks)
    return own


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    split = new_groups([[0, 1], [2, 3]])
    replicas = new_groups([[0, 2], [1, 3]])
    layers = nn.Sequential(*(SplitBlock(split) for _ in range(BLOCKS)))
    model = DistributedDataParallel(layers, process_group=replicas, bucket_cap_mb=4 * 2 * WIDTH * WIDTH / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    late = None
    for step in range(int(sys.argv[2])):
        if step == LATE_FROM:
            late = dist.new_group(LATE_GROUP)
        time.sleep(DEVICE_SECONDS)
        model(torch.randn(BATCH, WIDTH, requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if late is not None and dist.get_rank() in LATE_GROUP:
            dist.all_reduce(torch.ones(3), group=late)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
