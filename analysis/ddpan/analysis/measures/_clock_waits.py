"""Waits twice: from durations, which need no common clock, and from launches on aligned clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from ._clock_chain import Timeline, chain
from ._clock_fit import RESOLUTION_NS
from ._inference import Matrix
from ._meetings import Meetings

__all__ = ["WAIT_SCHEMA", "compare_waits"]

WAIT_SCHEMA: Final = pl.Schema(
    {
        "module": pl.UInt16,
        "group": pl.UInt16,
        "lowest_rank": pl.UInt32,
        "rank": pl.UInt32,
        "collectives": pl.UInt32,
        "wait_ns": pl.Float64,
        "wait_by_launch_ns": pl.Float64,
        "difference_ns": pl.Float64,
        "error_ns": pl.Float64,
        "agree": pl.Boolean,
        "transfer_ns": pl.Float64,
        "transfer_by_launch_ns": pl.Float64,
    }
)


def compare_waits(timeline: Timeline, meetings: Sequence[Meetings], clock_of: Mapping[int, str | int]) -> pl.DataFrame:
    """Both estimates of the waits of every rank, a row for each group and rank.

    Args:
        timeline: the clocks that are used.
        meetings: collectives of each group.
        clock_of: by rank, a name for its clock; ranks of one name are compared without an error of alignment.
    """
    rows = [row for one in meetings for row in _of_group(timeline, one, clock_of)]
    return pl.DataFrame(rows, schema=WAIT_SCHEMA).sort("module", "group", "lowest_rank", "rank", nulls_last=True)


def _of_group(timeline: Timeline, meetings: Meetings, clock_of: Mapping[int, str | int]) -> Iterator[dict[str, Any]]:
    duration = meetings.end_ns - meetings.launch_ns
    # As everywhere, only collectives that all ranks recorded tell who waited for whom.
    whole = meetings.judged & ~np.isnan(duration).any(axis=1)
    duration = duration[whole]
    if len(duration) == 0:
        return
    if not set(meetings.ranks) <= set(timeline.clocks):
        # Ranks that do not hang together with the reference may do so with each other.
        timeline = chain([meetings], timeline.base_ns, meetings.ranks)
    launch = timeline.place(meetings, meetings.launch_ns)[whole]
    end = timeline.place(meetings, meetings.end_ns)[whole]
    waits = duration - duration.min(axis=1, keepdims=True)
    # NaN for all ranks if one of them is not aligned: it may be the last one.
    by_launch = launch.max(axis=1, keepdims=True) - launch
    errors = _errors(timeline, meetings, clock_of, launch)
    for column, rank in enumerate(meetings.ranks):
        difference, error = float((waits - by_launch)[:, column].mean()), float(errors[column])
        unknown = np.isnan(difference)
        yield {
            "module": meetings.module,
            "group": meetings.group,
            "lowest_rank": meetings.ranks[0],
            "rank": rank,
            "collectives": len(duration),
            "wait_ns": float(waits[:, column].mean()),
            "wait_by_launch_ns": None if unknown else float(by_launch[:, column].mean()),
            "difference_ns": None if unknown else difference,
            "error_ns": None if unknown else error,
            "agree": None if unknown else abs(difference) <= error,
            "transfer_ns": float(np.median(duration.min(axis=1))),
            "transfer_by_launch_ns": None if unknown else float(np.median(end[:, column] - launch.max(axis=1))),
        }


def _errors(timeline: Timeline, meetings: Meetings, clock_of: Mapping[int, str | int], launch: Matrix) -> Matrix:
    """By how much the estimates of each rank may differ: how it and the last one leave, and the error of their clocks.

    Shape (ranks,), means over the collectives.
    """
    ranks = meetings.ranks
    clocks = [timeline.clocks.get(rank) for rank in ranks]
    exits = np.array([np.nan if clock is None else clock.exit_ns for clock in clocks])
    errors = np.array([np.nan if clock is None else clock.error_ns for clock in clocks])
    names = np.unique([str(clock_of.get(rank, rank)) for rank in ranks], return_inverse=True)[1]
    last = np.bincount(np.nan_to_num(launch, nan=-np.inf).argmax(axis=1), minlength=len(ranks)) / len(launch)
    between = np.where(names[:, None] == names, 0.0, errors[:, None] + errors)
    return np.asarray(RESOLUTION_NS + (exits[:, None] + exits + between) @ last)
