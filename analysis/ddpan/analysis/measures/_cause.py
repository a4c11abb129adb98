"""Why a rank is slow: the phase in which it loses the time, and the first bucket that this delays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from ._evidence import Evidence
from ._inference import Matrix, excess_over_others
from .verdict import Cause

__all__ = ["find_cause", "first_late_bucket"]


def find_cause(
    evidence: Evidence, phases_ns: Mapping[Cause, Matrix], rank: int, steps: npt.NDArray[np.bool_]
) -> tuple[Cause, float] | None:
    """The phase whose time in ``steps`` exceeds that of the other ranks by most, and by how much in nanoseconds.

    Only phases that surely take longer than in the other ranks count. The excess need not be the whole delay: while
    one rank sleeps, others on the same machine run faster, and part of a delay can move into a later phase.

    Args:
        evidence: the comparison.
        phases_ns: time of each phase, each of shape (steps, ranks).
        rank: column of the rank.
        steps: the steps in which it is slow, shape (steps,).
    """
    found: tuple[Cause, float] | None = None
    for cause, spent_ns in phases_ns.items():
        interval = evidence.estimate(spent_ns, np.array([rank]), steps)
        middle = float(interval.middle[0])
        if interval.low[0] > 0 and (found is None or middle > found[1]):
            found = cause, middle
    return found


def first_late_bucket(buckets: pl.DataFrame, rank: int, share: float) -> int | None:
    """The first bucket that a rank which is slow in its backward launches late.

    The lateness that the rank had before the backward is the same at all buckets; in the backward it grows to that of
    the last bucket. The first late bucket is the one at which more than half of the growth has happened.

    Args:
        buckets: rows of ``Facts.buckets`` of one module and layout, of the ranks that are compared.
        rank: global rank.
        share: the part of the delay that comes from the backward, 0 to 1.
    """
    table = buckets.pivot(on="rank", index="bucket", values="lateness_mean_ns").sort("bucket")
    values = table.drop("bucket").cast(pl.Float64).to_numpy()
    lateness = excess_over_others(np.asarray(values, np.float64))[:, table.columns.index(str(rank)) - 1]
    if len(lateness) == 0 or np.isnan(lateness).any():
        return None
    threshold = lateness[-1] * (1 - share / 2)
    return int(table["bucket"][int(np.argmax(lateness >= threshold))])
