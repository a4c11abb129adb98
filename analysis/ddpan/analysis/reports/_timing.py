"""Sections about time: where that of a step goes, the windows of DDP's logger, overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ._answer import PARTS
from ._sections import Column, Section, Table, keys
from ._units import milliseconds, percent

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

__all__ = ["overlap_section", "split_section", "statistics_section"]

_WINDOWS: Final = {
    "forward": "forward",
    "backward_compute": "backward compute",
    "backward_comm": "backward comm",
    "overlap": "overlap",
}
_MOMENTS: Final = {
    "mean": "mean_ns",
    "std": "std_ns",
    "min": "min_ns",
    "p50": "p50_ns",
    "p95": "p95_ns",
    "p99": "p99_ns",
    "max": "max_ns",
}
_OVERLAP: Final = {
    "comm.": "comm_ns",
    "hidden": "hidden_ns",
    "exposed": "exposed_ns",
    "tail": "tail_ns",
}


def split_section(summary: Summary) -> Section:
    """Where the time of a step goes."""
    split = summary.step_split
    key_columns, key_cells = keys(split, "module")
    columns = (*key_columns, Column("part of the step", text=True), Column("ms"), Column("share"))
    rows = (
        (*key_cells(row), PARTS[row["part"]], milliseconds(row["mean_ns"]), percent(row["share"]))
        for row in split.iter_rows(named=True)
    )
    return Section("Time of a step (mean over steps and ranks)", table=Table(columns, tuple(rows)))


def statistics_section(summary: Summary) -> Section:
    """The windows of PyTorch's DDP logger."""
    overall = summary.statistics.overall
    key_columns, key_cells = keys(overall, "module")
    columns = (*key_columns, Column("window", text=True), Column("n"), *map(Column, _MOMENTS))
    rows = (
        (*key_cells(row), _WINDOWS[row["window"]], f"{row['n']:,}", *_cells(row, _MOMENTS.values()))
        for row in overall.iter_rows(named=True)
    )
    note = (
        "Windows as in PyTorch's DDP logger, n times over all ranks. forward: the module's forward; backward compute: "
        "from its end to the last gradient; backward comm: from the first bucket's launch to the end of the backward; "
        "overlap: from the first bucket's launch to the last gradient, gaps with nothing in flight included."
    )
    return Section("Statistics (ms per step)", table=Table(columns, tuple(rows)), notes=(note,))


def overlap_section(summary: Summary) -> Section:
    """How much communication is hidden behind computation."""
    overall = summary.overlap.overall
    key_columns, key_cells = keys(overall, "module", "layout")
    columns = (*key_columns, Column("n"), *map(Column, _OVERLAP), Column("hidden/comm."), Column("exposed/step"))
    rows = (
        (
            *key_cells(row),
            f"{row['n']:,}",
            *_cells(row, _OVERLAP.values()),
            percent(row["ratio"]),
            percent(row["exposed_share"]),
        )
        for row in overall.iter_rows(named=True)
    )
    note = (
        "comm.: time with a gradient bucket in flight, waiting for others included; hidden: the part of it "
        "during the backward computation; exposed: the rest; tail: from the last gradient to the end of the backward."
    )
    reason = (f"No overlap to report: {summary.overlap.reason}.",) if summary.overlap.reason else ()
    return Section("Overlap (ms per step)", table=Table(columns, tuple(rows)), notes=(*reason, note))


def _cells(row: Mapping[str, Any], names: Iterable[str]) -> Iterable[str]:
    return (milliseconds(row[name]) for name in names)
