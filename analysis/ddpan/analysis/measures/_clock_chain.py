"""Clocks on one time axis: from group to group, through ranks that belong to both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ._clock_fit import LEAST_MEETINGS, Lines, fit_lines
from ._inference import Matrix
from ._meetings import Meetings

__all__ = ["Clock", "Timeline", "chain"]


@dataclass(frozen=True)
class Clock:
    """A clock against the reference: when that reads ``at + t``, it reads ``at + t + offset_ns + drift * t``.

    Attributes:
        offset_ns: see above; ``at`` is that of the `Timeline`.
        drift: see above.
        error_ns: half width of the error of these readings anywhere in the run.
        drift_error: half width of the error of the drift.
        exit_ns: how far from the middle of all ranks its ranks leave a collective, as a robust standard deviation.
        meetings: collectives that it was compared in.
    """

    offset_ns: int = 0
    drift: float = 0.0
    error_ns: float = 0.0
    drift_error: float = 0.0
    exit_ns: float = 0.0
    meetings: int = 0

    def onto_reference(self, moments_ns: npt.NDArray[np.int64], at_ns: int) -> npt.NDArray[np.int64]:
        """Readings of the reference at the moments when this clock read ``moments_ns``."""
        since = moments_ns - (at_ns + self.offset_ns)
        gained = np.rint(since * (self.drift / (1 + self.drift))).astype(np.int64)
        return np.asarray(moments_ns - self.offset_ns - gained)

    def seen_from(self, other: Clock) -> Clock:
        """This clock with ``other`` as the reference, at the moment when both offsets hold."""
        return Clock(
            offset_ns=self.offset_ns - other.offset_ns,
            drift=(1 + self.drift) / (1 + other.drift) - 1,
            error_ns=self.error_ns,
            drift_error=self.drift_error,
            exit_ns=self.exit_ns,
            meetings=self.meetings,
        )


@dataclass(frozen=True)
class Timeline:
    """The clocks of some ranks against that of a reference.

    Attributes:
        clocks: by rank; ranks that cannot be aligned are not among them.
        at_ns: the moment on the reference at which the offsets hold, in the middle of the run.
        base_ns: by rank, the moment from which the times of its `Meetings` count.
    """

    clocks: Mapping[int, Clock]
    at_ns: int
    base_ns: Mapping[int, int]

    def place(self, meetings: Meetings, moments_ns: Matrix) -> Matrix:
        """``moments_ns`` of ``meetings`` on the reference, since ``at_ns``; NaN for ranks that are not aligned."""
        clocks = [self.clocks.get(rank) for rank in meetings.ranks]
        ahead = [
            np.nan if clock is None else float(self.base_ns[rank] - self.at_ns - clock.offset_ns)
            for rank, clock in zip(meetings.ranks, clocks, strict=True)
        ]
        rate = [1.0 if clock is None else 1 + clock.drift for clock in clocks]
        return np.asarray((moments_ns + np.array(ahead)) / np.array(rate))


@dataclass(frozen=True)
class _Line:
    """A clock's reading since its base: ``x + shift_ns + drift * x``, x that of the reference since its own."""

    shift_ns: float = 0.0
    drift: float = 0.0
    error_ns: float = 0.0
    drift_error: float = 0.0
    exit_ns: float = 0.0
    meetings: int = 0


def chain(meetings: Sequence[Meetings], base_ns: Mapping[int, int], ranks: Sequence[int]) -> Timeline:
    """Align as many ranks as possible; the reference is the lowest of those that hang together.

    Args:
        meetings: of any groups.
        base_ns: by rank, the moment from which its times count.
        ranks: all ranks, ascending.
    """
    best: dict[int, _Line] = {}
    reached: set[int] = set()
    for reference in ranks:
        if reference not in reached:
            lines = _reach(meetings, reference)
            reached |= set(lines)
            best = max(best, lines, key=len)
        if 2 * len(best) >= len(ranks):
            break
    reference = min(best, default=0)
    middle = _middle(meetings, reference)
    base = base_ns.get(reference, 0)
    clocks = {rank: _clock(line, base_ns.get(rank, 0) - base, middle) for rank, line in sorted(best.items())}
    return Timeline(clocks, base + round(middle), base_ns)


def _reach(meetings: Sequence[Meetings], reference: int) -> dict[int, _Line]:
    """The lines of all ranks that hang together with ``reference``, the groups with most collectives first."""
    lines = {reference: _Line()}
    waiting = sorted((one for one in meetings if len(one) >= LEAST_MEETINGS), key=len, reverse=True)
    while True:
        new = [one for one in waiting if set(one.ranks) & set(lines) and not set(one.ranks) <= set(lines)]
        if not new:
            return lines
        waiting.remove(new[0])
        lines |= _through(new[0], lines)


def _through(meetings: Meetings, lines: Mapping[int, _Line]) -> dict[int, _Line]:
    """The lines of those ranks of one group that are not in ``lines`` yet, and the reference's own with its figures."""
    anchor = min((rank for rank in meetings.ranks if rank in lines), key=lambda rank: lines[rank].error_ns)
    column = meetings.ranks.index(anchor)
    fitted = fit_lines(meetings.end_ns, column)
    if np.isnan(fitted.shift_ns[column]):
        return {}
    found = {
        rank: _joined(lines[anchor], fitted, index, column)
        for index, rank in enumerate(meetings.ranks)
        if rank not in lines and not np.isnan(fitted.shift_ns[index])
    }
    if lines[anchor].meetings == 0:
        # The reference itself: it is where it is, but how well it shows the clock of its host is known only now.
        found[anchor] = replace(_joined(_Line(), fitted, column, column), error_ns=float(fitted.error_ns[column]))
    return found


def _joined(anchor: _Line, fitted: Lines, index: int, column: int) -> _Line:
    """The line of a rank through the anchor's; errors add up, since habits of leaving do not average out."""
    shift, drift = float(fitted.shift_ns[index]), float(fitted.drift[index])
    return _Line(
        shift_ns=shift + (1 + drift) * anchor.shift_ns,
        drift=(1 + drift) * (1 + anchor.drift) - 1,
        error_ns=anchor.error_ns + float(fitted.error_ns[index] + fitted.error_ns[column]),
        drift_error=anchor.drift_error + float(fitted.drift_error[index] + fitted.drift_error[column]),
        exit_ns=float(fitted.exit_ns[index]),
        meetings=int(fitted.meetings[index]),
    )


def _middle(meetings: Sequence[Meetings], reference: int) -> float:
    """Reading of the reference in the middle of all that it recorded, since its base."""
    of_reference = [one.end_ns[:, one.ranks.index(reference)] for one in meetings if reference in one.ranks]
    moments = np.concatenate([np.zeros(1), *of_reference])
    return float(np.nanmax(moments) + np.nanmin(moments)) / 2


def _clock(line: _Line, ahead_ns: int, middle_ns: float) -> Clock:
    """The clock with its offset at ``middle_ns`` of the reference, whose base its own is ``ahead_ns`` of."""
    return Clock(
        offset_ns=ahead_ns + round(line.shift_ns + line.drift * middle_ns),
        drift=line.drift,
        error_ns=line.error_ns,
        drift_error=line.drift_error,
        exit_ns=line.exit_ns,
        meetings=line.meetings,
    )
