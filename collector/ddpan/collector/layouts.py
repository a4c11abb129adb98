"""What a DDP module is, and how its reducer lays out the buckets."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .schema import BucketInfo, ModuleInfo

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["Layout", "describe_module", "read_layout", "reduced_parameters"]


@dataclass(frozen=True)
class Layout:
    """One arrangement of parameters in buckets.

    Attributes:
        number: 0 for the buckets DDP starts with, 1 once it has rebuilt them in the order of the gradients.
        sizes_bytes: size of each bucket, in index order; empty in the one step after a rebuild, when the reducer uses
            the new buckets but does not tell them yet.
        parameters: for each bucket the indices of its parameters, empty where the reducer does not tell.
    """

    number: int
    sizes_bytes: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...] = field(default=())

    def as_metadata(self, names: list[str]) -> list[BucketInfo]:
        """The buckets as the log's metadata holds them, with the parameters' names."""
        known = self.parameters or ((),) * len(self.sizes_bytes)
        return [
            BucketInfo(bytes=size, parameters=[names[i] for i in indices if i < len(names)])
            for size, indices in zip(self.sizes_bytes, known, strict=True)
        ]


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Any]]:
    """Names and parameters that the reducer handles, in its order."""
    ignored = ddp.parameters_to_ignore
    return [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def describe_module(ddp: DistributedDataParallel, *, group: int, comm_hook: str | None) -> ModuleInfo:
    """How the module was built."""
    parameters = [p for _, p in reduced_parameters(ddp)]
    cap = getattr(ddp, "bucket_bytes_cap", None)
    return ModuleInfo(
        kind="ddp",
        name=type(ddp.module).__name__,
        group=group,
        parameters=len(parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        bucket_cap_mb=None if cap is None else cap / 2**20,
        find_unused_parameters=bool(ddp.find_unused_parameters),
        gradient_as_bucket_view=bool(ddp.gradient_as_bucket_view),
        static_graph=bool(ddp.static_graph),
        comm_hook=comm_hook,
        joined_after_step=None,
        zero_stage=None,
    )


def read_layout(ddp: DistributedDataParallel, *, rebuilt: bool) -> Layout | None:
    """The reducer's present buckets, or None where there is no reducer to ask."""
    if getattr(ddp, "logger", None) is None:
        return None
    told: dict[str, Any] = ddp._get_ddp_logging_data()
    sizes = _numbers(str(told.get("rebuilt_bucket_sizes" if rebuilt else "bucket_sizes", "")), ",")
    if not sizes:
        return None
    if rebuilt:
        indices = str(told.get("rebuilt_per_bucket_param_indices", "")).split(",")
        parameters = tuple(_numbers(bucket, None) for bucket in indices)
    else:
        parameters = _first_assignment(ddp, len(sizes))
    if len(parameters) != len(sizes) or not all(parameters):
        parameters = ()
    return Layout(number=int(rebuilt), sizes_bytes=sizes, parameters=parameters)


def _first_assignment(ddp: DistributedDataParallel, buckets: int) -> tuple[tuple[int, ...], ...]:
    """Parameters of the first buckets; the reducer does not tell them, but one bucket can only hold them all."""
    if buckets != 1:
        return ()
    return (tuple(range(len(reduced_parameters(ddp)))),)


def _numbers(text: str, separator: str | None) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        return tuple(int(part) for part in text.split(separator) if part.strip())
    return ()
