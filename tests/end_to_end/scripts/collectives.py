"""A known sequence of collectives, issued by hand on two ranks; each kind of them has groups of its own."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

BY_HAND_SECONDS = 0.05


def plain(default: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    own, all_of_them = torch.ones(8), torch.zeros(16)
    two = [torch.zeros(8), torch.zeros(8)]
    dist.all_reduce(own)
    dist.all_reduce(own, group=second)
    finish(dist.all_reduce(own, async_op=True))
    dist.reduce(own, 0)
    dist.broadcast(torch.ones(4, dtype=torch.float64), 0, group=second)
    dist.all_gather(two, own)
    dist.all_gather_into_tensor(all_of_them, own)
    dist.reduce_scatter(own, two)
    dist.reduce_scatter_tensor(own, all_of_them, group=second)
    dist.all_to_all_single(all_of_them, torch.ones(16))
    dist.all_to_all(two, [torch.ones(8), torch.ones(8)])
    dist.gather(own, two if rank == 0 else None, 0)
    dist.scatter(own, two if rank == 0 else None, 0)
    dist.barrier()
    default.allreduce([own]).wait()


def coalesced(group: dist.ProcessGroup) -> None:
    own, all_of_them = torch.ones(8), torch.zeros(16)
    with _coalescing_manager(group):
        dist.all_reduce(own, group=group)
        dist.all_reduce(torch.ones(4), group=group)
    with _coalescing_manager(group):
        dist.all_gather_into_tensor(all_of_them, own, group=group)
        dist.all_gather_into_tensor(torch.zeros(8), torch.ones(4), group=group)
    with _coalescing_manager(group):
        dist.reduce_scatter_tensor(own, all_of_them, group=group)
        dist.reduce_scatter_tensor(torch.ones(4), torch.zeros(8), group=group)


def between_two(group: dist.ProcessGroup) -> None:
    """Sends and receives; the ranks have different numbers of them."""
    rank = dist.get_rank()
    other = 1 - rank
    own = torch.ones(8)
    if rank == 0:
        dist.send(own, other, group=group)
        finish(dist.isend(torch.ones(2), other, group=group))
    else:
        dist.recv(own, group=group)
        finish(dist.irecv(torch.ones(2), other, group=group))
    ops = ((dist.isend, torch.ones(3)), (dist.irecv, torch.ones(3)))
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, other, group) for op, tensor in ops]):
        work.wait()


def waiting(group: dist.ProcessGroup) -> None:
    """Rank 1 comes late to an all-reduce that rank 0 waits for, after some work of its own beside it."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        time.sleep(3 * BY_HAND_SECONDS)
    work = dist.all_reduce(torch.ones(8), async_op=True, group=group)
    if rank == 0:
        time.sleep(BY_HAND_SECONDS)
    finish(work)


def finish(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    default = dist.group.WORLD
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    assert default is not None
    plain(default, groups[0])
    coalesced(groups[1])
    between_two(groups[2])
    waiting(groups[3])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
