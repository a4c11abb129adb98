"""The report of ``ddpan collectives``: operations, sizes and process groups, how long, how fast, and who came last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from ddpan.analysis.measures.collectives import LEFT_TOGETHER

from ._records import rows
from ._sections import Column, Section, Table
from ._units import UNKNOWN, duration, fine_milliseconds, percent, plural, rank_list, shown, size
from .document import Document

if TYPE_CHECKING:
    from ddpan.analysis.measures.collectives import CollectiveTables
    from ddpan.analysis.run import Run

__all__ = ["collectives_document"]

_MOST_ROWS: Final = 24
_KEYS: Final = ("group", "lowest_rank", "op", "bytes")


def collectives_document(run: Run, result: CollectiveTables) -> Document:
    """The report on the collectives of ``run``."""
    return Document(
        answer=_answer(result),
        fine=not result.sizes.is_empty(),
        sections=(_times(result), _bandwidths(result), _ranks(result)),
        facts={"run": run.id, "path": str(run.path)},
        tables={"sizes": rows(result.sizes), "ranks": rows(result.ranks)},
        keys=(*_KEYS, "rank"),
    )


def _answer(result: CollectiveTables) -> list[str]:
    if result.sizes.is_empty():
        return ["No collective was recorded."]
    total = float(result.sizes["total_ns"].sum())
    first = result.sizes.row(0, named=True)
    lines = [
        f"A rank spent {duration(total)} in {plural(int(result.sizes['count'].sum()), 'collective')}, most of it, "
        f"{duration(first['total_ns'])}, in {first['op']} of {size(first['bytes'])} on ranks {_named(first)}."
    ]
    if shown(first["wait_ns"]) and first["duration_ns"]:
        lines.append(
            f"Such a one takes {duration(first['duration_ns'])}: {duration(first['transfer_ns'])} for the transfer and "
            f"{duration(first['wait_ns'])} waiting for the last rank, which is rank {first['last_rank']} in "
            f"{percent(first['last_share'])} of them."
        )
    return lines


def _named(row: Mapping[str, Any]) -> str:
    """The ranks of a group, cut short where they are in many pieces."""
    text = rank_list(row["ranks"] or ())
    return text if len(text) <= 14 else f"{text[:11]}..."


def _table(frame: pl.DataFrame, columns: tuple[Column, ...], cells: Any) -> Table:
    keys = (Column("operation", text=True), Column("ranks", text=True), Column("bytes"))
    shown_rows = frame.head(_MOST_ROWS).iter_rows(named=True)
    return Table(
        (*keys, *columns), tuple((row["op"], _named(row), size(row["bytes"]), *cells(row)) for row in shown_rows)
    )


def _times(result: CollectiveTables) -> Section:
    heads = ("count", "total, s", "ms each", "wait", "transfer", "hidden", "exposed", "last", "share")

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        times = (row[f"{name}_ns"] for name in ("duration", "wait", "transfer", "hidden", "exposed"))
        last = UNKNOWN if row["last_rank"] is None else str(row["last_rank"])
        total = f"{row['total_ns'] / 1e9:,.3f}" if shown(row["total_ns"]) else UNKNOWN
        return (f"{row['count']:,}", total, *map(fine_milliseconds, times), last, percent(row["last_share"]))

    note = (
        "Times are means over ranks, in ms but for the total. wait: for the last rank to come; transfer: the shortest "
        "time of any rank; hidden: behind the backward computation while the rank did not stand still; exposed: the "
        "rest; last: the rank that came last most often, with its share."
    )
    return _section("Collectives", result, tuple(map(Column, heads)), cells, note)


def _bandwidths(result: CollectiveTables) -> Section:
    heads = ("algbw, GB/s", "busbw, GB/s", "algbw without skew", "busbw without skew")

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        names = ("algbw_observed", "busbw_observed", "algbw_transfer", "busbw_transfer")
        return tuple(f"{row[name] / 1e9:.3g}" if shown(row[name]) else UNKNOWN for name in names)

    note = (
        "As in nccl-tests, for the size of the group. Without skew: from the transfer alone, so that waiting for a "
        "late rank does not pass for a slow network."
    )
    return _section("Bandwidth", result, tuple(map(Column, heads)), cells, note)


def _section(title: str, result: CollectiveTables, columns: tuple[Column, ...], cells: Any, note: str) -> Section:
    if result.sizes.is_empty():
        return Section(title, notes=("Nothing to show: no collective was recorded.",))
    if hidden := result.sizes.height - _MOST_ROWS:
        note = f"{plural(hidden, 'more row')}; --format csv or json has all of them. {note}" if hidden > 0 else note
    return Section(title, table=_table(result.sizes, columns, cells), notes=(note,))


def _ranks(result: CollectiveTables) -> Section:
    """Over all collectives that ranks leave together: how long each waited for others, and how often it came last."""
    together = result.ranks.filter(pl.col("op").is_in(LEFT_TOGETHER))
    summed = together.group_by("rank").agg(pl.col("straggler_ns", "last", "count").sum())
    table = summed.sort("last", "rank", descending=[True, False])
    if table.is_empty():
        return Section("Ranks", notes=("Nothing to show: no collective was recorded.",))
    cells = tuple(
        (str(row["rank"]), f"{row['count']:,}", f"{row['last']:,}", f"{(row['straggler_ns'] or 0) / 1e9:,.3f}")
        for row in table.head(_MOST_ROWS).iter_rows(named=True)
    )
    columns = (Column("rank"), Column("collectives"), Column("came last"), Column("waited for others, s"))
    note = "The rank that came last waited for nobody: the one with the shortest waiting is the late one."
    note = f"Of collectives that no rank can leave before all have come. {note}"
    return Section("Ranks", table=Table(columns, cells), notes=(note,))
