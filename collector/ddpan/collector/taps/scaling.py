"""The arithmetic that the reducer does where it has no communication hook, to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Scale"]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class Scale:
    """Scales a bucket the way the reducer would have without a hook.

    Multiplication by 1/n and division by n differ in the last bit unless n is a power of two. The reducer divides
    sparse gradients, and gradients that were views of the bucket before this backward, which can only be where
    ``gradient_as_bucket_view`` is set and gradients are kept; it multiplies elsewhere. n is the size of the group, or
    under ``join(divide_by_initial_world_size=False)`` the number of ranks that have not joined.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._divisor: int = ddp.process_group.size()
        self.views_possible = bool(ddp.gradient_as_bucket_view)
        self._flat_division = bool(getattr(ddp, "batched_grad_copy", False))
        self._storages: dict[int, int] = {}
        self._live: dist.Work | None = None

    def count_live(self, work: dist.Work | None) -> None:
        """Divide by the number of ranks that have not joined, which ``work`` sums up; None: by the group's size."""
        self._live = work

    @property
    def must_look(self) -> bool:
        """Whether `look` is needed before each backward."""
        return self.views_possible and (self._live is not None or not _is_power_of_two(self._divisor))

    def look(self, ddp: DistributedDataParallel) -> None:
        """Note where each gradient lies now, before the backward touches it."""
        self._storages = {
            id(p): p.grad.untyped_storage().data_ptr()
            for p in ddp.module.parameters()
            if p.grad is not None and p.grad.layout is torch.strided
        }

    def __call__(self, buffer: torch.Tensor, bucket: GradBucket) -> None:
        """Scale the bucket in place."""
        divisor = self._divisor if self._live is None else self._live_ranks(self._live)
        if self._flat_division or buffer.is_sparse:
            buffer.div_(divisor)
        elif not self.must_look:
            buffer.mul_(1.0 / divisor)
        else:
            self._by_gradient(buffer, bucket, divisor)

    def _live_ranks(self, work: dist.Work) -> int:
        work.wait()
        return int(work.get_future().value()[0].item())

    def _by_gradient(self, buffer: torch.Tensor, bucket: GradBucket, divisor: int) -> None:
        storage = buffer.untyped_storage().data_ptr()
        views = [self._storages.get(id(p)) == storage for p in bucket.parameters()]
        if not any(views):
            buffer.mul_(1.0 / divisor)
        elif all(views):
            buffer.div_(divisor)
        else:
            for gradient, is_view in zip(bucket.gradients(), views, strict=True):
                gradient.div_(divisor) if is_view else gradient.mul_(1.0 / divisor)
