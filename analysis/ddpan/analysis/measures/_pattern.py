"""When a rank is slow: always, from some step on, for a stretch of steps, or now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ._evidence import SHORTEST_STRETCH, SIGNIFICANCE, Evidence
from ._inference import MAD_TO_SIGMA, median
from ._stretch import change_p_values, find_stretches, refine

__all__ = ["Pattern", "find_pattern", "is_rotating"]

_OUTSIDE_SHARE: Final = 1 / 3
_OFTEN: Final = 2.0
_LEAST_COST: Final = 1 / 3
_QUARTILE_SIGMAS: Final = 1.5
_CLEAR_OF_LIMIT: Final = 4 / 3
_ROTATING_SIGMAS: Final = 2.25
_ROTATING_SHARE: Final = 0.5


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
    return _stretch(evidence, rank) or _intermittent(evidence, rank) or _steady(evidence, rank)


def is_rotating(evidence: Evidence) -> bool:
    """Whether in most steps one rank is far behind all others, although no rank is so more often than the others.

    That is: in more than half of the steps, the latest is further behind the second than 2.25 times the spread of
    the others, and than one hundredth of the step, and no rank is in more than half of these steps. Noise, even
    heavy-tailed, does not do that: the two latest of many ranks are mostly near each other. Of a step in which some
    ranks are unknown, the latest may be among them, so it counts by the share that is known. Needs three ranks.
    """
    arrival = evidence.arrival_ns
    known = np.sum(~np.isnan(arrival), axis=1)
    arrival, known = arrival[known >= 3], known[known >= 3]
    if len(arrival) == 0:
        return False
    ordered = np.sort(arrival, axis=1)
    rows = np.arange(len(ordered))
    latest = np.where(np.isnan(arrival), -np.inf, arrival).argmax(axis=1)
    behind = ordered[rows, known - 1] - ordered[rows, known - 2]
    ordered[rows, known - 1] = np.nan
    others = known - 1
    deviation = np.abs(ordered - median(ordered, axis=1)[:, None]) * np.sqrt(others / (others - 1))[:, None]
    deviation = deviation[deviation > 0]  # of an odd number, the middle one has none and says nothing
    spread = MAD_TO_SIGMA * float(np.median(deviation)) if len(deviation) else 0.0
    alone = behind > max(_ROTATING_SIGMAS * spread, evidence.smallest_ns)
    often = alone.sum() > _ROTATING_SHARE * float(np.sum(known / arrival.shape[1]))
    return bool(often and 2 * np.bincount(latest[alone]).max() <= alone.sum())


def _stretch(evidence: Evidence, rank: int) -> Pattern | None:
    """One stretch of slow steps, to the end or not, with steps outside it that are not slow."""
    if min(evidence.stretch_p_values[rank], evidence.late_p_values[rank]) >= SIGNIFICANCE:
        return None
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
    healthy = _healthy(evidence, rank, ~affected, pattern) and not _also_late_outside(evidence, rank, pattern)
    return pattern if healthy and _is_steady(evidence, rank, pattern) and _matters(evidence, rank, pattern) else None


def _steady(evidence: Evidence, rank: int) -> Pattern | None:
    """Slow in nearly all steps."""
    pattern = _measured("persistent", evidence, rank, np.ones(len(evidence.excess_ns), np.bool_))
    steady = evidence.level_ns[rank] > evidence.floor_ns(rank) and _is_steady(evidence, rank, pattern)
    return pattern if steady and _matters(evidence, rank, pattern) else None


def _is_steady(evidence: Evidence, rank: int, pattern: Pattern) -> bool:
    """Whether the lower quartile of the lateness in the affected steps is not far below its median."""
    quartile = float(np.nanquantile(evidence.excess_ns[pattern.affected, rank], 0.25))
    return pattern.delay_ns - quartile <= max(_QUARTILE_SIGMAS * evidence.noise_ns, pattern.delay_ns / 2)


def _intermittent(evidence: Evidence, rank: int) -> Pattern | None:
    """Slow in some steps here and there, which cost a third of what a delay worth naming in every step would.

    The late steps must stand clear of the limit from which they count: heavy-tailed noise just passes it.
    """
    late = evidence.late[:, rank]
    if not late.any() or evidence.late_p_values[rank] >= SIGNIFICANCE:
        return None
    excess = evidence.excess_ns[:, rank]
    late = excess > max(evidence.late_ns[rank], float(median(excess[late])) / 2)
    if 2 * late.sum() > np.sum(~np.isnan(excess)):
        return None
    pattern = _measured("intermittent", evidence, rank, late)
    cost_ns = float(excess[late].sum()) / len(excess)
    clear = pattern.delay_ns > _CLEAR_OF_LIMIT * evidence.late_ns[rank]
    # What the rank loses in its late steps must explain that it is slow, not a delay in all the others.
    healthy = float(median(excess[~late])) < max(evidence.smallest_ns, cost_ns) / 2
    costly = cost_ns > _LEAST_COST * evidence.smallest_ns
    own = clear and costly and healthy and _more_often_late(evidence, rank, pattern)
    return pattern if own and _matters(evidence, rank, pattern) else None


def _more_often_late(evidence: Evidence, rank: int, pattern: Pattern) -> bool:
    """Whether the rank exceeds half its delay at least twice as often as the others usually do.

    Where ranks are late in turn, small differences between them can be significant and mean nothing.
    """
    known = ~np.isnan(evidence.excess_ns)
    late = np.sum(evidence.excess_ns > pattern.delay_ns / 2, axis=0) / np.maximum(known.sum(axis=0), 1)
    return bool(late[rank] >= _OFTEN * np.median(np.delete(late, rank)))


def _healthy(evidence: Evidence, rank: int, steps: npt.NDArray[np.bool_], pattern: Pattern) -> bool:
    """Whether in ``steps``, those that ``pattern`` does not affect, the rank is usually not late."""
    usual = float(median(evidence.excess_ns[steps, rank]))
    return usual < max(_OUTSIDE_SHARE * pattern.delay_ns, evidence.smallest_ns)


def _also_late_outside(evidence: Evidence, rank: int, pattern: Pattern) -> bool:
    """Whether the rank is late outside the stretch too, a quarter as often as inside or more.

    Only a delay that stands clear of the noise in a single step can come now and then.
    """
    if pattern.delay_ns < _CLEAR_OF_LIMIT * evidence.late_ns[rank]:
        return False
    late = evidence.excess_ns[:, rank] > pattern.delay_ns / 2
    inside, outside = late[pattern.affected], late[~pattern.affected]
    return bool(4 * outside.mean() > inside.mean() or 2 * outside.sum() > inside.sum())


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
