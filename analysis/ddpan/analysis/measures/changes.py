"""Change points: the steps at which the step time, or the lateness of a rank, goes to another level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Run
from ._arrivals import Arrivals, find_arrivals
from ._evidence import SMALLEST_SHARE
from ._inference import Matrix, excess_over_others
from ._level_change import LevelChange, measure_changes
from ._segmentation import SHORTEST_WINDOW, find_cuts
from .facts import facts

__all__ = ["CHANGE_SIGNIFICANCE", "ChangePoints", "change_points"]

CHANGE_SIGNIFICANCE: Final = 0.003
"""Adjusted p-value below which a change is reported; heavy tails and a long memory may treble the true rate."""

_MOST_ROWS: Final = 4096
_SCHEMA: Final = pl.Schema(
    {
        "module": pl.UInt16,
        "lowest_rank": pl.UInt32,
        "series": pl.String,
        "rank": pl.UInt32,
        "step": pl.UInt32,
        "before_ns": pl.Float64,
        "after_ns": pl.Float64,
        "change_ns": pl.Float64,
        "change_low_ns": pl.Float64,
        "change_high_ns": pl.Float64,
        "p_value": pl.Float64,
    }
)


@dataclass(frozen=True)
class ChangePoints:
    """Where levels change.

    ``changes`` has one row per change, in the order of the steps:

    - ``module``; ``lowest_rank``: the lowest rank of the process group, which tells groups of a module apart.
    - ``series``: ``step_time``, or ``lateness`` of the rank ``rank`` against the median of the other ranks; ``rank`` is
      null for the step time.
    - ``step``: the first step of the new level.
    - ``before_ns``, ``after_ns``: medians from the change before to this one and from here to the next one.
    - ``change_ns``, ``change_low_ns``, ``change_high_ns``: the difference of the levels with its 95 % interval.
    - ``p_value``: chance of so clear a change anywhere in the run if nothing had changed.

    Attributes:
        changes: see above.
        series: number of series that were examined.
        reason: why none was, or None.
    """

    changes: pl.DataFrame
    series: int
    reason: str | None


@dataclass(frozen=True)
class _Series:
    """One series, without the steps in which it is unknown.

    Attributes:
        rank: its column among the ranks; None for the step time.
        rows: rows of the arrivals that are known, shape (known,).
        values_ns: shape (known,).
    """

    rank: int | None
    rows: npt.NDArray[np.intp]
    values_ns: Matrix


def change_points(run: Run) -> ChangePoints:
    """Find the steps at which the step time of ``run`` or the lateness of a rank goes to another level.

    The time of a step and each rank's lateness against the median of the other ranks are looked at, in the steps that
    are no warm-up. A change must be significant under the correlation of the noise that is found, and at least a
    hundredth of the step time. A rank that becomes late moves the median that others are compared with; a change that
    only mirrors a larger one of another rank is left out.
    """
    groups = [group for group in find_arrivals(run, facts(run)) if len(group.steps)]
    of_groups = [_series(group) for group in groups]
    tested = [[one for one in series if len(one.values_ns) >= SHORTEST_WINDOW] for series in of_groups]
    count = sum(map(len, tested))
    tables = [_table(group, _changes(group, series, count)) for group, series in zip(groups, tested, strict=True)]
    longest = max((len(group.steps) for group in groups), default=0)
    reason = f"{longest:,} comparable steps outside warm-up are too few: a change needs {SHORTEST_WINDOW}"
    changes = pl.concat([pl.DataFrame(schema=_SCHEMA), *tables])
    changes = changes.sort(
        "module", "step", "series", "lowest_rank", "rank", descending=[False, False, True, False, False]
    )
    return ChangePoints(changes, series=count, reason=None if count else reason)


def _series(group: Arrivals) -> list[_Series]:
    """The step time and, with two ranks or more, the lateness of each."""
    lateness = excess_over_others(group.arrival_ns)
    ranks = range(lateness.shape[1]) if lateness.shape[1] > 1 else ()
    found = [(None, group.step_time_ns), *((rank, lateness[:, rank]) for rank in ranks)]
    known = [(rank, np.flatnonzero(~np.isnan(values)), values) for rank, values in found]
    return [_Series(rank, rows, values[rows]) for rank, rows, values in known]


def _changes(group: Arrivals, series: Sequence[_Series], count: int) -> list[tuple[_Series, LevelChange]]:
    """Changes of the series of one group, ``count`` being the number of series in the whole run."""
    known = group.step_time_ns[~np.isnan(group.step_time_ns)]
    smallest_ns = SMALLEST_SHARE * float(known.mean()) if len(known) else np.inf
    found = []
    for alike in _alike(series):
        thinned, every = _thinned(np.column_stack([one.values_ns for one in alike]))
        for one, cuts in zip(alike, find_cuts(thinned, significance=CHANGE_SIGNIFICANCE / count), strict=True):
            changes = measure_changes(one.values_ns, cuts, rows_per_cut=every, smallest_ns=smallest_ns)
            found += [(one, replace(change, p_value=min(1.0, change.p_value * count))) for change in changes]
    return [pair for pair in found if not _is_echo(group, pair, found)]


def _alike(series: Sequence[_Series]) -> list[list[_Series]]:
    """The series in lists that can be looked at together: the same quantity, known in the same steps."""
    groups: dict[tuple[bool, bytes], list[_Series]] = {}
    for one in series:
        groups.setdefault((one.rank is None, one.rows.tobytes()), []).append(one)
    return list(groups.values())


def _thinned(values: Matrix) -> tuple[Matrix, int]:
    """Medians of consecutive rows, so that no more than `_MOST_ROWS` are left, and how many rows each stands for."""
    every = -(-len(values) // _MOST_ROWS)
    if every == 1:
        return values, 1
    kept = len(values) // every
    return np.median(values[: kept * every].reshape(kept, every, -1), axis=1), every


def _is_echo(group: Arrivals, pair: tuple[_Series, LevelChange], others: Sequence[tuple[_Series, LevelChange]]) -> bool:
    """Whether a change in lateness only mirrors another rank's, which moved the median, and not the rank's own time."""
    series, change = pair
    if series.rank is None:
        return False
    mirrored = any(
        other.rank not in (None, series.rank)
        and change.change_ns * of_other.change_ns < 0
        and abs(change.change_ns) <= 1.1 * abs(of_other.change_ns)
        and abs(series.rows[change.at] - other.rows[of_other.at]) <= change.blur + of_other.blur
        for other, of_other in others
    )
    return mirrored and _own_change_ns(group, series, change) * np.sign(change.change_ns) < abs(change.change_ns) / 2


def _own_change_ns(group: Arrivals, series: _Series, change: LevelChange) -> float:
    """How much the rank's own way to its last bucket became longer at ``change``."""
    own = group.arrival_ns[series.rows, series.rank]
    return float(np.median(own[change.at : change.end]) - np.median(own[change.begin : change.at]))


def _table(group: Arrivals, changes: Sequence[tuple[_Series, LevelChange]]) -> pl.DataFrame:
    rows = [
        {
            "module": group.module,
            "lowest_rank": min(group.members),
            "series": "step_time" if series.rank is None else "lateness",
            "rank": None if series.rank is None else group.ranks[series.rank],
            "step": int(group.steps[series.rows[change.at]]),
            **{name: getattr(change, name) for name in _SCHEMA.names()[5:]},
        }
        for series, change in changes
    ]
    return pl.DataFrame(rows, schema=_SCHEMA)
