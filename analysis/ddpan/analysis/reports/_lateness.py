"""Sections about ranks against each other: who is late, and at which buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ._sections import Column, Section, Table, keys, printable
from ._units import UNKNOWN, milliseconds, percent, plural, size

if TYPE_CHECKING:
    import polars as pl

    from ddpan.analysis.measures.summary import Summary

__all__ = ["buckets_section", "ranks_section"]

_MOST_RANKS: Final = 16
_MOST_BUCKETS: Final = 16
_KEPT: Final = 8
"""Rows that are shown where there are more than fit."""

_PHASES: Final = ("data", "forward", "backward", "optimizer", "other")
_BUCKET_TIMES: Final = {
    "flight": "duration_ns",
    "transfer": "transfer_ns",
    "wait": "wait_ns",
    "exposed": "exposed_ns",
    "queued": "queue_ns",
}


def ranks_section(summary: Summary) -> Section:
    """The ranks, the latest first; of many, the first ones and the median of all."""
    ranks = summary.stragglers.ranks.sort("module", "delay_ns", descending=[False, True], nulls_last=True)
    key_columns, key_cells = keys(ranks, "module")
    show_host = len(summary.hosts) > 1
    host = (Column("host", text=True, wraps=True),) if show_host else ()
    columns = (*key_columns, Column("rank"), Column("late"), Column("last"), *map(Column, _PHASES), *host)
    cut = ranks.height > _MOST_RANKS
    kept = ranks.head(_KEPT) if cut else ranks
    rows = [
        (*key_cells(row), str(row["rank"]), *_rank(row), *([printable(row["host"] or UNKNOWN)] if show_host else []))
        for row in kept.iter_rows(named=True)
    ]
    notes = [
        "late: how much later than the others the rank launches its last bucket; last: share of steps in which it is "
        "the last to do so; data to other: how much longer than in the others that phase takes (negative: shorter).",
    ]
    if cut:
        middle = ranks.median().row(0, named=True)
        rows.append((*("" for _ in key_columns), "median", *_rank(middle), *([""] if show_host else [])))
        notes.insert(0, f"{plural(ranks.height - kept.height, 'more rank')}; --format csv or json has all of them.")
    return Section("Ranks, the latest first (ms per step)", table=Table(columns, tuple(rows)), notes=tuple(notes))


def buckets_section(summary: Summary) -> Section:
    """The buckets in their order; of many, those that cost most."""
    buckets = summary.stragglers.buckets
    key_columns, key_cells = keys(buckets, "module", "layout")
    late = (Column("rank"), Column("late"), Column("last"))
    columns = (*key_columns, Column("bucket"), Column("size"), *map(Column, _BUCKET_TIMES), *late)
    kept = _costliest(buckets)
    alone = len(summary.ranks) == 1
    rows = ((*key_cells(row), *_bucket(row), *_latest(row, alone=alone)) for row in kept.iter_rows(named=True))
    notes = [
        "flight: from launch to end; transfer: what that takes once all ranks are there; wait: for other ranks; "
        "exposed: not hidden behind the backward; queued: from the last gradient to the launch; late: how much later "
        "than the median the rank launches it, which is the slow one or else the one most often last; last: how often.",
    ]
    if kept.height < buckets.height:
        more = plural(buckets.height - kept.height, "more bucket")
        notes.insert(0, f"{more} with less exposed time; --format csv or json has all of them.")
    return Section("Buckets (ms per step, means over ranks)", table=Table(columns, tuple(rows)), notes=tuple(notes))


def _costliest(buckets: pl.DataFrame) -> pl.DataFrame:
    if buckets.height <= _MOST_BUCKETS:
        return buckets
    worst = buckets.with_row_index("place").sort("exposed_ns", descending=True, nulls_last=True).head(_KEPT)
    return worst.sort("place").drop("place")


def _rank(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        milliseconds(row["delay_ns"]),
        percent(row["last_share"]),
        *(milliseconds(row[f"{phase}_ns"]) for phase in _PHASES),
    )


def _bucket(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(row["bucket"]), size(row["bytes"]), *(milliseconds(row[name]) for name in _BUCKET_TIMES.values()))


def _latest(row: Mapping[str, Any], *, alone: bool) -> tuple[str, ...]:
    if alone or row["rank"] is None:
        return (UNKNOWN, UNKNOWN, UNKNOWN)
    return (str(row["rank"]), milliseconds(row["lateness_ns"]), percent(row["last_share"]))
