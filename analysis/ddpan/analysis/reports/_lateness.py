"""Sections about ranks against each other: who is late, and at which buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ._sections import Column, Section, Table, keys, printable
from ._units import UNKNOWN, milliseconds, percent, plural, size

if TYPE_CHECKING:
    import polars as pl

    from ddpan.analysis.measures.summary import Summary
    from ddpan.analysis.measures.verdict import Verdict

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
    with_host = len(summary.hosts) > 1
    host = (Column("host", text=True, wraps=True),) if with_host else ()
    columns = (*key_columns, Column("rank"), Column("late"), Column("last"), *map(Column, _PHASES), *host)
    rows: list[tuple[str, ...]] = []
    for of_module in ranks.partition_by("module", maintain_order=True):
        shown = _latest_ranks(of_module)
        rows += ((*key_cells(row), *_rank(row, with_host=with_host)) for row in shown.iter_rows(named=True))
        if shown.height < of_module.height:
            middle = {**of_module.median().row(0, named=True), "rank": "median", "host": ""}
            rows.append((*key_cells(shown.row(0, named=True)), *_rank(middle, with_host=with_host)))
    notes = [
        "late: how much later than the others the rank launches its last bucket; last: share of steps in which it is "
        "the last to do so; data to other: how much longer than in the others that phase takes (negative: shorter).",
    ]
    if hidden := ranks.height - sum(row[len(key_columns)] != "median" for row in rows):
        notes.insert(0, f"{plural(hidden, 'more rank')}; --format csv or json has all of them.")
    return Section("Ranks, the latest first (ms per step)", table=Table(columns, tuple(rows)), notes=tuple(notes))


def buckets_section(summary: Summary) -> Section:
    """The buckets in their order; of many, those that cost most and those where a rank becomes late."""
    buckets = summary.stragglers.buckets
    key_columns, key_cells = keys(buckets, "module", "layout")
    late = (Column("rank"), Column("late"), Column("last"))
    columns = (*key_columns, Column("bucket"), Column("size"), *map(Column, _BUCKET_TIMES), *late)
    alone = len(summary.ranks) == 1
    shown = [
        row
        for of_layout in buckets.partition_by("module", "layout", maintain_order=True)
        for row in _telling_buckets(of_layout, summary.stragglers.verdict).iter_rows(named=True)
    ]
    rows = ((*key_cells(row), *_bucket(row), *_latest(row, alone=alone)) for row in shown)
    notes = [
        "flight: from launch to end; transfer: what that takes once all ranks are there; wait: for other ranks; "
        "exposed: not hidden behind the backward; queued: from the last gradient to the launch; late: how much later "
        "than the median the rank launches it, which is the slow one or else the one most often last; last: how often.",
    ]
    if hidden := buckets.height - len(shown):
        notes.insert(0, f"{plural(hidden, 'more bucket')}, less exposed; --format csv or json has all of them.")
    return Section("Buckets (ms per step, means over ranks)", table=Table(columns, tuple(rows)), notes=tuple(notes))


def _latest_ranks(ranks: pl.DataFrame) -> pl.DataFrame:
    return ranks.head(_KEPT) if ranks.height > _MOST_RANKS else ranks


def _telling_buckets(buckets: pl.DataFrame, verdict: Verdict) -> pl.DataFrame:
    """The most exposed buckets, and the first late one with the one before it."""
    if buckets.height <= _MOST_BUCKETS:
        return buckets
    exposed = buckets.sort("exposed_ns", descending=True, nulls_last=True).head(_KEPT)
    first = verdict.first_late_bucket
    turn = [] if first is None or verdict.module != buckets["module"][0] else [first - 1, first]
    return buckets.filter(buckets["bucket"].is_in([*exposed["bucket"].to_list(), *turn]))


def _rank(row: Mapping[str, Any], *, with_host: bool) -> tuple[str, ...]:
    return (
        str(row["rank"]),
        milliseconds(row["delay_ns"]),
        percent(row["last_share"]),
        *(milliseconds(row[f"{phase}_ns"]) for phase in _PHASES),
        *((printable(UNKNOWN if row["host"] is None else row["host"]),) if with_host else ()),
    )


def _bucket(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(row["bucket"]), size(row["bytes"]), *(milliseconds(row[name]) for name in _BUCKET_TIMES.values()))


def _latest(row: Mapping[str, Any], *, alone: bool) -> tuple[str, ...]:
    if alone or row["rank"] is None:
        return (UNKNOWN, UNKNOWN, UNKNOWN)
    return (str(row["rank"]), milliseconds(row["lateness_ns"]), percent(row["last_share"]))
