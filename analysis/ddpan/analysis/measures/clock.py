"""Clock alignment: by how much the clock of each host is ahead of a reference, and how fast it gains on it.

Ranks leave a collective together, so its ends are moments that all clocks have seen. docs/metrics.md has the method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..errors import UsageError
from ..run import Run
from ._clock_chain import Clock, Timeline, chain
from ._clock_fit import LEAST_MEETINGS
from ._clock_waits import compare_waits
from ._host_clock import HostClock, host_clocks
from ._meetings import Meetings, other_meetings, step_meetings
from .facts import facts

__all__ = ["ClockOffsets", "clock_offsets"]

_FITTED: Final[dict[str, Any]] = {
    "offset_ns": pl.Int64,
    "drift_ppm": pl.Float64,
    "error_ns": pl.Float64,
    "drift_error_ppm": pl.Float64,
}
_HOST_SCHEMA: Final = pl.Schema(
    {"host": pl.String, "ranks": pl.UInt32, **_FITTED, "spread_ns": pl.Float64, "reason": pl.String}
)
_RANK_SCHEMA: Final = pl.Schema(
    {
        "rank": pl.UInt32,
        "host": pl.String,
        "collectives": pl.UInt32,
        **_FITTED,
        "exit_ns": pl.Float64,
        "residual_ns": pl.Float64,
        "shares_host_clock": pl.Boolean,
        "reason": pl.String,
    }
)


@dataclass(frozen=True)
class ClockOffsets:
    """How the clocks run against a reference: the clock of the host of the lowest rank that can be aligned.

    ``offset_ns`` is the reading of a clock less that of the reference, at the moment ``at_ns`` of the reference;
    ``drift_ppm`` by how many millionths it runs faster. ``error_ns`` is the half width of the error of a reading
    anywhere in the run, ``drift_error_ppm`` that of the drift. All are null for a clock that cannot be aligned, and
    ``reason`` says why.

    - ``hosts``: one row per host, with its number of ``ranks``, the medians of their estimates, and ``spread_ns``, by
      how much one of them is off at the most.
    - ``ranks``: one row per rank, with its own estimate from the ``collectives`` that it shares with others;
      ``exit_ns``, how far from the middle of all ranks it leaves them (a robust standard deviation); ``residual_ns``,
      its own offset less that of its host; and ``shares_host_clock``, false if it cannot possibly have its clock.
    - ``waits``: one row per rank of each ``module`` (null: collectives that are no buckets) and process group, known by
      its number ``group`` and its ``lowest_rank``: over ``collectives`` that all recorded (the last buckets of the
      steps outside warm-up, where they are buckets), the mean ``wait_ns`` by durations and ``wait_by_launch_ns``, by
      launches on aligned clocks; their ``difference_ns``, its ``error_ns``, and whether they ``agree`` within it; the
      median ``transfer_ns``, the shortest duration of any rank, and ``transfer_by_launch_ns``, from the latest launch
      to the rank's own end.

    Attributes:
        reference_rank: the rank, and
        reference_host: the host whose clock is the reference.
        at_ns: see above, nanoseconds since the epoch.
        hosts: see above.
        ranks: see above.
        waits: see above.
        reason: what cannot be aligned, or None. Nothing may be concluded from comparing timestamps of such clocks.
    """

    reference_rank: int
    reference_host: str
    at_ns: int
    hosts: pl.DataFrame
    ranks: pl.DataFrame
    waits: pl.DataFrame
    reason: str | None
    _clocks: Mapping[int, Clock] = field(repr=False)

    def onto_reference(self, rank: int, moments_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Moments on the clock of ``rank`` as moments on the reference clock, of the same shape.

        Raises:
            UsageError: the clock of this rank could not be aligned.
        """
        if rank not in self._clocks:
            raise UsageError(f"the clock of rank {rank} is not aligned with that of rank {self.reference_rank}")
        return self._clocks[rank].onto_reference(moments_ns, self.at_ns)


def clock_offsets(run: Run) -> ClockOffsets:
    """Align the clocks of ``run``.

    The last buckets of the steps are used, and where these do not bring all ranks together, other collectives that
    ranks leave together.
    """
    known = facts(run)
    base_ns: dict[int, int] = {}
    meetings = step_meetings(run, known, base_ns)
    own = chain(meetings, base_ns, run.ranks)
    if len(own.clocks) < len(run.ranks) > 1:
        meetings += other_meetings(run, base_ns)
        own = chain(meetings, base_ns, run.ranks)
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for rank in run.ranks:
        hosts[run.metadata[rank]["host"]].append(rank)
    return _offsets(own, meetings, dict(sorted(hosts.items())))


def _offsets(own: Timeline, meetings: Sequence[Meetings], hosts: Mapping[str, Sequence[int]]) -> ClockOffsets:
    found = host_clocks(own, meetings, hosts)
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    reference_rank = min(own.clocks)
    reference = found[host_of[reference_rank]].clock or own.clocks[reference_rank]
    own = Timeline(
        {rank: _seen(clock, reference) for rank, clock in own.clocks.items()},
        own.at_ns + reference.offset_ns,
        own.base_ns,
    )
    found = {host: replace(one, clock=one.clock and _seen(one.clock, reference)) for host, one in found.items()}
    name_of = {rank: host for host, one in found.items() for rank in one.sharing}
    used = {rank: found[name_of[rank]].clock if rank in name_of else clock for rank, clock in own.clocks.items()}
    clocks = {rank: clock for rank, clock in used.items() if clock is not None}
    return ClockOffsets(
        reference_rank=reference_rank,
        reference_host=host_of[reference_rank],
        at_ns=own.at_ns,
        hosts=pl.DataFrame([_host_row(host, hosts[host], one) for host, one in found.items()], schema=_HOST_SCHEMA),
        ranks=pl.DataFrame(
            [_rank_row(rank, host_of[rank], own, found) for rank in sorted(host_of)], schema=_RANK_SCHEMA
        ),
        waits=compare_waits(replace(own, clocks=clocks), meetings, name_of),
        reason=_reason(sorted(set(host_of) - set(clocks)), reference_rank),
        _clocks=clocks,
    )


def _seen(clock: Clock, reference: Clock) -> Clock:
    """``clock`` against ``reference``, which is right by definition."""
    seen = clock.seen_from(reference)
    return replace(seen, error_ns=0.0, drift_error=0.0) if clock == reference else seen


def _host_row(host: str, ranks: Sequence[int], found: HostClock) -> dict[str, Any]:
    reason = None if found.clock else "none of its ranks can be aligned, or they do not share a clock"
    return {"host": host, "ranks": len(ranks), **_fitted(found.clock), "spread_ns": found.spread_ns, "reason": reason}


def _rank_row(rank: int, host: str, own: Timeline, found: Mapping[str, HostClock]) -> dict[str, Any]:
    clock, of_host = own.clocks.get(rank), found[host]
    aligned = clock is not None and of_host.clock is not None
    return {
        "rank": rank,
        "host": host,
        "collectives": clock.meetings if clock else 0,
        **_fitted(clock),
        "exit_ns": clock.exit_ns if clock else None,
        "residual_ns": float(clock.offset_ns - of_host.clock.offset_ns) if clock and of_host.clock else None,
        "shares_host_clock": rank in of_host.sharing if aligned else None,
        "reason": None if clock else f"it shares fewer than {LEAST_MEETINGS} collectives with the others",
    }


def _fitted(clock: Clock | None) -> dict[str, float | None]:
    if clock is None:
        return dict.fromkeys(_FITTED)
    return {
        "offset_ns": clock.offset_ns,
        "drift_ppm": clock.drift * 1e6,
        "error_ns": clock.error_ns,
        "drift_error_ppm": clock.drift_error * 1e6,
    }


def _reason(missing: Sequence[int], reference_rank: int) -> str | None:
    if not missing:
        return None
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return f"the clocks of {ranks} cannot be aligned with that of rank {reference_rank}: too few collectives in common"
