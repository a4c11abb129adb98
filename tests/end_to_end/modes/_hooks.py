"""Communication hooks such as people write.

DDP looks at their annotations and takes no strings, so that this module is without ``from __future__``.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

__all__ = ["clipping", "halving", "silent"]

Future = torch.futures.Future[torch.Tensor]


def clipping(state: dist.ProcessGroup, bucket: GradBucket) -> Future:
    """The mean over the ranks, within bounds; it calls the group itself and goes on in the future's callback."""
    tensor = bucket.buffer().div_(state.size())

    def clip(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return done.value()[0].clamp_(-0.5, 0.5)

    return state.allreduce([tensor]).get_future().then(clip)


def halving(state: dist.ProcessGroup, bucket: GradBucket) -> Future:
    """The mean over the ranks, of which half of the bits are sent."""
    tensor = bucket.buffer().half().div_(state.size())

    def restore(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return state.allreduce([tensor]).get_future().then(restore)


def silent(_state: object, bucket: GradBucket) -> Future:
    """Sends nothing, as in a training that averages its parameters from time to time instead."""
    future: Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
