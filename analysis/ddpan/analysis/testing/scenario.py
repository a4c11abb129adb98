"""What a synthetic run should be like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..errors import UsageError

__all__ = ["CAUSES", "Fault", "Scenario"]

CAUSES: Final = ("data", "forward", "backward", "optimizer", "other")
"""Phases of a step that a fault can lengthen."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A delay of one rank in one phase, or of the transfer.

    Attributes:
        rank: global rank.
        cause: one of `CAUSES`; ``other`` is user code before the first forward of the step. Or ``collective``: the
            transfer of a bucket takes longer, for all ranks alike, whatever ``rank`` is.
        delay_ns: added to each step concerned.
        first_step: first step concerned.
        end_step: the step after the last, or None for the end of the run.
        bucket: for ``backward`` the first bucket that is late, None for the middle one; for ``collective`` the bucket
            whose transfer is slow, None for the last one.
        share: share of these steps that are concerned, drawn at random one by one.
        delay_noise: standard deviation of the delay from step to step, relative to it.
    """

    rank: int
    cause: str
    delay_ns: int
    first_step: int = 0
    end_step: int | None = None
    bucket: int | None = None
    share: float = 1.0
    delay_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.cause not in (*CAUSES, "collective"):
            raise UsageError(f"cause must be one of {', '.join(CAUSES)} or collective, not {self.cause!r}")
        if not 0 <= self.share <= 1:
            raise UsageError(f"share must be between 0 and 1, not {self.share}")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A synthetic run of one DDP module.

    Phases are medians in nanoseconds; each is multiplied by lognormal noise, drawn anew for every rank and step.

    Attributes:
        ranks: number of ranks, all in one group.
        ranks_per_host: ranks on each host; they share its clock.
        steps: number of steps.
        buckets: buckets per step.
        bucket_bytes: payload of each bucket.
        micro_batches: forwards per step; all but the last are under ``no_sync``.
        data_ns: waiting for the DataLoader, per forward.
        other_ns: user code before each forward.
        forward_ns: each forward.
        backward_ns: each backward computation, divided evenly among the buckets.
        optimizer_ns: the optimizer's step.
        noise: sigma of the logarithm of each phase, for the backward of each bucket's share of it.
        noise_correlation: correlation of this noise between a step and the next (autoregressive of first order).
        noise_tail: degrees of freedom of Student's t that it follows, 3 or more, scaled to the same sigma; None for a
            normal distribution. With correlation, that of its innovations.
        pace: by rank, how many times as long as in the others its forward and backward take in every step; 1 for
            ranks that are not there.
        exit_ns: mean time after which a rank notices that a collective has ended, drawn anew from an exponential
            distribution for each.
        transfer_ns: transfer of each bucket.
        transfer_noise: sigma of its logarithm; the same on all ranks.
        copy_ns: from the end of the last bucket to the end of the backward.
        rebuilt: whether the first step has a single bucket of another layout, as in DDP.
        faults: delays.
        clock_offset_ns: by host number, what its clock is ahead.
        clock_drift_ppm: by host number, how much faster its clock runs.
        lost: by rank, the share of its rows that are lost, drawn at random.
        seed: of the random numbers; the same scenario always gives the same run.
        run: id of the run.
        start_ns: begin of the run, nanoseconds since the epoch.
    """

    ranks: int = 4
    ranks_per_host: int = 8
    steps: int = 100
    buckets: int = 8
    bucket_bytes: int = 25 << 20
    micro_batches: int = 1
    data_ns: int = 1_000_000
    other_ns: int = 500_000
    forward_ns: int = 20_000_000
    backward_ns: int = 40_000_000
    optimizer_ns: int = 4_000_000
    noise: float = 0.02
    noise_correlation: float = 0.0
    noise_tail: float | None = None
    pace: Mapping[int, float] = field(default_factory=dict)
    exit_ns: int = 0
    transfer_ns: int = 3_000_000
    transfer_noise: float = 0.05
    copy_ns: int = 200_000
    rebuilt: bool = True
    faults: tuple[Fault, ...] = ()
    clock_offset_ns: Mapping[int, int] = field(default_factory=dict)
    clock_drift_ppm: Mapping[int, float] = field(default_factory=dict)
    lost: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    run: str = "20260102T030405-0badcafe"
    start_ns: int = 1_767_323_045_000_000_000

    def __post_init__(self) -> None:
        if min(self.ranks, self.ranks_per_host, self.steps, self.buckets, self.micro_batches) < 1:
            raise UsageError("ranks, ranks_per_host, steps, buckets and micro_batches must be 1 or more")
        if not 0 <= self.noise_correlation < 1:
            raise UsageError(f"noise_correlation must be at least 0 and less than 1, not {self.noise_correlation}")
        if self.noise_tail is not None and self.noise_tail < 3:
            raise UsageError(f"noise_tail must be 3 or more, not {self.noise_tail}: t has no variance below")
        if strangers := [fault.rank for fault in self.faults if not 0 <= fault.rank < self.ranks]:
            raise UsageError(f"a fault names rank {strangers[0]}, but the ranks are 0 to {self.ranks - 1}")

    def host(self, rank: int) -> int:
        """Number of the rank's host."""
        return rank // self.ranks_per_host
