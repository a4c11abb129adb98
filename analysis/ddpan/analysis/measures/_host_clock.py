"""The clock of a host, which its ranks share: estimated from all of them, and checked against each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ._clock_chain import Clock, Timeline
from ._inference import Matrix
from ._meetings import Meetings

__all__ = ["HostClock", "host_clocks"]

_IMPOSSIBLE_SHARE: Final = 0.05


@dataclass(frozen=True)
class HostClock:
    """What the ranks of a host say about its clock.

    Attributes:
        clock: the median of theirs; None if most of them cannot share one, or none is aligned.
        sharing: the ranks that can share it.
        spread_ns: the largest difference of the offset of one of these from it; None without any.
    """

    clock: Clock | None
    sharing: tuple[int, ...]
    spread_ns: float | None


def host_clocks(
    timeline: Timeline, meetings: Sequence[Meetings], hosts: Mapping[str, Sequence[int]]
) -> dict[str, HostClock]:
    """The clocks of the hosts.

    A rank that always leaves collectives late looks as if its clock were ahead. It is taken to have the clock of its
    host unless that is impossible: unless in one collective in twenty it would then have left before another rank had
    come, or come when another had left.

    Args:
        timeline: the ranks' own clocks.
        meetings: what they were aligned by.
        hosts: ranks by host.
    """
    aligned = {host: [rank for rank in ranks if rank in timeline.clocks] for host, ranks in hosts.items()}
    pooled = {host: _pooled([timeline.clocks[rank] for rank in ranks]) for host, ranks in aligned.items() if ranks}
    of_host = {rank: pooled[host] for host, ranks in aligned.items() for rank in ranks}
    apart = _impossible(timeline, replace(timeline, clocks=of_host), meetings)
    return {host: _host_clock(timeline, pooled.get(host), ranks, apart) for host, ranks in aligned.items()}


def _host_clock(timeline: Timeline, clock: Clock | None, ranks: Sequence[int], apart: set[int]) -> HostClock:
    sharing = tuple(rank for rank in ranks if rank not in apart)
    if clock is None or 2 * len(sharing) <= len(ranks):
        return HostClock(None, (), None)
    spread = max(abs(timeline.clocks[rank].offset_ns - clock.offset_ns) for rank in sharing)
    return HostClock(clock, sharing, float(spread))


def _pooled(clocks: Sequence[Clock]) -> Clock:
    """The median of some clocks, field by field."""
    lowest = min(clock.offset_ns for clock in clocks)

    def middle(name: str) -> float:
        return float(np.median([getattr(clock, name) for clock in clocks]))

    return Clock(
        # Offsets may be hours; their differences are exact as floating-point numbers.
        offset_ns=lowest + round(float(np.median([clock.offset_ns - lowest for clock in clocks]))),
        drift=middle("drift"),
        error_ns=middle("error_ns"),
        drift_error=middle("drift_error"),
        exit_ns=middle("exit_ns"),
        meetings=round(middle("meetings")),
    )


def _impossible(own: Timeline, of_host: Timeline, meetings: Sequence[Meetings]) -> set[int]:
    """Ranks that with the clock of their host would have left a collective too early or come to it too late."""
    known: dict[int, int] = {}
    wrong: dict[int, int] = {}
    for one in meetings:
        last_come = _largest_of_others(own.place(one, one.launch_ns))
        first_gone = -_largest_of_others(-own.place(one, one.end_ns))
        launch, end = of_host.place(one, one.launch_ns), of_host.place(one, one.end_ns)
        # Comparisons with NaN are false, and a maximum over nothing is minus infinity: what is unknown is possible.
        error = np.array([_allowance(own, of_host, rank) for rank in one.ranks])
        against = (end < last_come - error) | (launch > first_gone + error)
        for column, rank in enumerate(one.ranks):
            known[rank] = known.get(rank, 0) + int((~np.isnan(end[:, column])).sum())
            wrong[rank] = wrong.get(rank, 0) + int(against[:, column].sum())
    return {rank for rank, count in wrong.items() if count > _IMPOSSIBLE_SHARE * known[rank]}


def _allowance(own: Timeline, of_host: Timeline, rank: int) -> float:
    clocks = [timeline.clocks[rank] for timeline in (own, of_host) if rank in timeline.clocks]
    return sum(clock.error_ns for clock in clocks)


def _largest_of_others(values: Matrix) -> Matrix:
    """For each rank the largest value of the other ranks in each row, minus infinity where there is none."""
    known = np.where(np.isnan(values), -np.inf, values)
    if known.shape[1] < 2:
        return np.full_like(known, -np.inf)
    second, first = np.partition(known, -2, axis=1)[:, -2:].T
    largest = np.broadcast_to(first[:, None], known.shape).copy()
    rows = np.arange(len(known))
    largest[rows, known.argmax(axis=1)] = second
    return largest
