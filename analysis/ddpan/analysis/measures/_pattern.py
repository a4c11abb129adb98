"""When a rank is slow: always, from some step on, for a stretch of steps, or now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ._evidence import SHORTEST_STRETCH, SIGNIFICANCE, Evidence, late_p_values
from ._inference import block_edges, median
from ._stretch import change_p_values, find_stretches, refine

__all__ = ["Pattern", "find_pattern", "is_rotating"]

_OUTSIDE_SHARE: Final = 1 / 3
_QUARTILE_SIGMAS: Final = 1.5
_CLEAR_OF_LIMIT: Final = 5 / 3
_ROTATING_SPREADS: Final = 1.5
_MOST_BLOCKS: Final = 64


@dataclass(frozen=True)
class Pattern:
    """When a rank is slow, and by how much in those steps.

    Attributes:
        kind: in which way.
        affected: the steps in which it is slow, shape (steps,).
        delay_ns: its median lateness in them.
        low_ns: lower end of the confidence interval of the delay.
        high_ns: upper end.
    """

    kind: Literal["persistent", "onset", "transient", "intermittent"]
    affected: npt.NDArray[np.bool_]
    delay_ns: float
    low_ns: float
    high_ns: float


def find_pattern(evidence: Evidence, rank: int) -> Pattern | None:
    """How the rank in column ``rank`` is slow, or None if it is not by enough to matter."""
    return _stretch(evidence, rank) or _steady(evidence, rank) or _intermittent(evidence, rank)


def is_rotating(evidence: Evidence) -> bool:
    """Whether in most steps one rank is far behind all others, although no rank is so more often than the others.

    That is: in three quarters of the steps, the latest is further behind the second than one and a half times what
    the first is usually ahead of the middle, and further than two hundredths of the step. Noise, even skewed, does
    not do that. Needs three ranks.
    """
    arrival = evidence.arrival_ns[~np.isnan(evidence.arrival_ns).any(axis=1)]
    if arrival.shape[1] < 3 or len(arrival) == 0:
        return False
    ordered = np.sort(arrival, axis=1)
    behind = float(np.quantile(ordered[:, -1] - ordered[:, -2], 0.25))
    ahead = float(np.median(np.median(ordered, axis=1) - ordered[:, 0]))
    return behind > max(_ROTATING_SPREADS * ahead, 2 * evidence.smallest_ns)


def _stretch(evidence: Evidence, rank: int) -> Pattern | None:
    """One stretch of slow steps, to the end or not, with steps outside it that are not slow."""
    blocks = evidence.blocks_ns[:, [rank]]
    found = find_stretches(blocks, shortest=SHORTEST_STRETCH)
    if found is None or change_p_values(len(blocks), found)[0] >= SIGNIFICANCE:
        return None
    known = np.flatnonzero(~np.isnan(evidence.excess_ns[:, rank]))
    edges = np.searchsorted(known, evidence.edges)
    reach = int(np.diff(evidence.edges).max())
    first, end = refine(evidence.excess_ns[known, rank], int(edges[found.first[0]]), int(edges[found.end[0]]), reach)
    affected = np.zeros(len(evidence.excess_ns), np.bool_)
    affected[known[first] : known[end - 1] + 1] = True
    pattern = _measured("onset" if end == len(known) else "transient", evidence, rank, affected)
    healthy = _healthy(evidence, rank, ~affected, pattern) and not _also_late_outside(evidence, rank, affected)
    return pattern if healthy and _matters(evidence, rank, pattern) else None


def _steady(evidence: Evidence, rank: int) -> Pattern | None:
    """Slow in nearly all steps: the lower quartile of the lateness is not far below its median."""
    pattern = _measured("persistent", evidence, rank, np.ones(len(evidence.excess_ns), np.bool_))
    quartile = float(np.nanquantile(evidence.excess_ns[:, rank], 0.25))
    drop = max(_QUARTILE_SIGMAS * evidence.noise_ns, pattern.delay_ns / 2)
    steady = evidence.level_ns[rank] > evidence.floor_ns(rank) and pattern.delay_ns - quartile <= drop
    return pattern if steady and _matters(evidence, rank, pattern) else None


def _intermittent(evidence: Evidence, rank: int) -> Pattern | None:
    """Slow in some steps here and there, which cost half as much as a delay worth naming in every step would.

    The late steps must stand clear of the limit from which they count: heavy-tailed noise just passes it.
    """
    late = evidence.late[:, rank]
    if not late.any():
        return None
    excess = evidence.excess_ns[:, rank]
    late = excess > max(evidence.late_ns[rank], float(median(excess[late])) / 2)
    pattern = _measured("intermittent", evidence, rank, late)
    costly = float(excess[late].sum()) / len(excess) > evidence.smallest_ns / 2
    clear = pattern.delay_ns > _CLEAR_OF_LIMIT * evidence.late_ns[rank]
    healthy = _healthy(evidence, rank, ~late, pattern)
    return pattern if costly and clear and healthy and _matters(evidence, rank, pattern) else None


def _healthy(evidence: Evidence, rank: int, steps: npt.NDArray[np.bool_], pattern: Pattern) -> bool:
    """Whether in ``steps``, those that ``pattern`` does not affect, the rank is usually not late."""
    usual = float(median(evidence.excess_ns[steps, rank]))
    return usual < max(_OUTSIDE_SHARE * pattern.delay_ns, evidence.smallest_ns)


def _also_late_outside(evidence: Evidence, rank: int, affected: npt.NDArray[np.bool_]) -> bool:
    late = evidence.late[~affected]
    edges = block_edges(len(late), evidence.correlation, most=_MOST_BLOCKS)
    return bool(late_p_values(late, edges)[rank] < SIGNIFICANCE)


def _measured(
    kind: Literal["persistent", "onset", "transient", "intermittent"],
    evidence: Evidence,
    rank: int,
    affected: npt.NDArray[np.bool_],
) -> Pattern:
    """The delay in the steps ``affected``, with an interval from blocks of them."""
    interval = evidence.estimate(evidence.arrival_ns, np.array([rank]), affected)
    return Pattern(kind, affected, float(interval.middle[0]), float(interval.low[0]), float(interval.high[0]))


def _matters(evidence: Evidence, rank: int, pattern: Pattern) -> bool:
    return pattern.delay_ns > evidence.floor_ns(rank) and pattern.low_ns > evidence.smallest_ns
