"""The report of ``ddpan clock``: how the clocks run, how well that is known, and whether both waits agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from ._records import rows
from ._sections import Column, Section, Table, keys, printable
from ._units import UNKNOWN, duration, fine_milliseconds, moment, plural, rank_list, shown
from .document import Document

if TYPE_CHECKING:
    from ddpan.analysis.measures.clock import ClockOffsets
    from ddpan.analysis.run import Run

__all__ = ["clock_document"]

_MOST_ROWS: Final = 16
_FITTED: Final = (Column("ahead"), Column("+/-"), Column("drift, ppm"), Column("+/-, ppm"))


def clock_document(run: Run, offsets: ClockOffsets) -> Document:
    """The report on the clocks of ``run``."""
    return Document(
        answer=_answer(offsets),
        fine=offsets.reason is None and not _disagreeing(offsets),
        sections=(_hosts(offsets), _ranks(offsets), _waits(offsets)),
        facts={
            "run": run.id,
            "path": str(run.path),
            "reference_rank": offsets.reference_rank,
            "reference_host": offsets.reference_host,
            "at_ns": offsets.at_ns,
            "reason": offsets.reason,
        },
        tables={"hosts": rows(offsets.hosts), "ranks": rows(offsets.ranks), "waits": rows(offsets.waits)},
        keys=("module", "group", "lowest_rank", "host", "rank"),
    )


def _answer(offsets: ClockOffsets) -> list[str]:
    return [_alignment(offsets), *filter(None, (_caution(offsets), _agreement(offsets)))]


def _alignment(offsets: ClockOffsets) -> str:
    hosts, ranks = offsets.hosts.drop_nulls("offset_ns"), offsets.ranks.drop_nulls("offset_ns")
    if ranks.height < 2:
        return "No clocks can be aligned: no two ranks share enough collectives."
    if hosts.height == 1 and offsets.reason is None:
        return f"All {plural(ranks.height, 'rank')} are on one host and share its clock."
    offsets_ns, errors_ns = hosts["offset_ns"].to_list(), hosts["error_ns"].to_list()
    if len(offsets_ns) < 2:
        return f"The clocks of {plural(ranks.height, 'rank')} are aligned."
    return (
        f"The clocks of {plural(len(offsets_ns), 'host')} are aligned: they differ by up to "
        f"{duration(max(offsets_ns) - min(offsets_ns))}, known to within {fine_milliseconds(max(errors_ns))} ms."
    )


def _caution(offsets: ClockOffsets) -> str:
    if offsets.reason is not None:
        reason = printable(offsets.reason)
        return f"{reason[:1].upper()}{reason[1:]}. Compare none of their timestamps with those of other ranks."
    apart = offsets.ranks.filter(~pl.col("shares_host_clock"))["rank"].to_list()
    if apart:
        return f"Ranks {rank_list(apart)} cannot have the clock of their host; each is aligned by itself."
    return ""


def _agreement(offsets: ClockOffsets) -> str:
    judged = offsets.waits.drop_nulls("agree")
    if judged.is_empty():
        return ""
    if not (ranks := _disagreeing(offsets)):
        return "Waits by durations and waits by launches on the aligned clocks agree on every rank."
    return (
        f"Waits by durations and waits by launches on the aligned clocks disagree on ranks {rank_list(ranks)}: "
        "do not trust waits of these ranks that are smaller than the difference."
    )


def _disagreeing(offsets: ClockOffsets) -> list[int]:
    return offsets.waits.filter(~pl.col("agree"))["rank"].unique().sort().to_list()


def _hosts(offsets: ClockOffsets) -> Section:
    columns = (Column("host", text=True, wraps=True), Column("ranks"), *_FITTED, Column("spread"))
    cells = (
        (printable(row["host"]), str(row["ranks"]), *_fitted(row), fine_milliseconds(row["spread_ns"]))
        for row in offsets.hosts.iter_rows(named=True)
    )
    reference = f"rank {offsets.reference_rank} on {printable(offsets.reference_host)}, at {moment(offsets.at_ns)}"
    note = (
        "ahead: reading of the clock less that of the reference, at the moment of the reference given above; drift: "
        "how much faster it runs; +/-: half width of the error anywhere in the run; spread: largest difference of a "
        "rank's own estimate."
    )
    return Section(
        "Clocks of the hosts (ms)", facts=(("reference", reference),), table=Table(columns, tuple(cells)), notes=(note,)
    )


def _ranks(offsets: ClockOffsets) -> Section:
    table = offsets.ranks.sort(pl.col("residual_ns").abs(), descending=True, nulls_last=False, maintain_order=True)
    host = Column("host", text=True, wraps=True)
    columns = (Column("rank"), host, Column("collectives"), *_FITTED, Column("off its host"), Column("leaves within"))
    cells = (
        (
            str(row["rank"]),
            printable(row["host"]),
            f"{row['collectives']:,}",
            *_fitted(row),
            fine_milliseconds(row["residual_ns"]),
            fine_milliseconds(row["exit_ns"]),
        )
        for row in table.head(_MOST_ROWS).iter_rows(named=True)
    )
    note = (
        "Each rank's own estimate, the one furthest off its host first; leaves within: how far from the middle of all "
        "ranks it leaves a collective, as a standard deviation."
    )
    return Section("Clocks of the ranks (ms)", table=Table(columns, tuple(cells)), notes=(*_more(table), note))


def _waits(offsets: ClockOffsets) -> Section:
    table = offsets.waits.sort(pl.col("difference_ns").abs(), descending=True, nulls_last=True, maintain_order=True)
    key_columns, key_cells = keys(table, "module", "group", "lowest_rank")
    heads = ("rank", "collectives", "by durations", "by launches", "difference", "+/-")
    columns = (*key_columns, *map(Column, heads), Column("agree", text=True), Column("transfer"), Column("by launches"))
    cells = ((*key_cells(row), *_wait(row)) for row in table.head(_MOST_ROWS).iter_rows(named=True))
    notes = (
        *_more(table),
        "Mean wait for the last bucket of a step, by durations (own duration less the shortest of any rank) and by "
        "launches (latest launch of any rank less its own, on aligned clocks); median transfer likewise (shortest "
        "duration; latest launch to own end).",
    )
    if table.is_empty():
        return Section("Waits by two estimators (ms)", notes=("No collective was recorded by all of its ranks.",))
    return Section("Waits by two estimators (ms)", table=Table(columns, tuple(cells)), notes=notes)


def _wait(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("wait_ns", "wait_by_launch_ns", "difference_ns", "error_ns")
    return (
        str(row["rank"]),
        f"{row['collectives']:,}",
        *(fine_milliseconds(row[name]) for name in names),
        {True: "yes", False: "no"}.get(row["agree"], UNKNOWN),
        fine_milliseconds(row["transfer_ns"]),
        fine_milliseconds(row["transfer_by_launch_ns"]),
    )


def _fitted(row: Mapping[str, Any]) -> tuple[str, ...]:
    drift, error = (f"{row[name]:.2f}" if shown(row[name]) else UNKNOWN for name in ("drift_ppm", "drift_error_ppm"))
    return (fine_milliseconds(row["offset_ns"]), fine_milliseconds(row["error_ns"]), drift, error)


def _more(table: pl.DataFrame) -> tuple[str, ...]:
    hidden = table.height - _MOST_ROWS
    return (f"{plural(hidden, 'more row')}; --format csv or json has all of them.",) if hidden > 0 else ()
