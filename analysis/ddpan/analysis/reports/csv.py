"""The report as one long CSV table, a value in each row, for spreadsheets and scripts; docs/json.md describes it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from ._records import Record, run_record, tables, verdict_record

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

__all__ = ["COLUMNS", "render"]

_KEYS: Final = ("module", "layout", "rank", "bucket")
_ITEMS: Final = ("window", "part", "kind")
"""Columns that tell rows of a table apart beside `_KEYS`; they share the column ``item``."""

COLUMNS: Final = ("table", *_KEYS, "item", "metric", "value")
"""The header."""


def render(summary: Summary) -> str:
    """The report as CSV; an empty field where a value is not known or a key does not apply."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(summary))
    return file.getvalue()


def _rows(summary: Summary) -> Iterator[tuple[Any, ...]]:
    yield from _melted("run", run_record(summary), keys=())
    yield from _melted("verdict", verdict_record(summary.stragglers.verdict), keys=())
    for table, records in tables(summary).items():
        keys = (*_KEYS, *_ITEMS) if table != "buckets" else ("module", "layout", "bucket")
        for record in records:
            yield from _melted(table, record, keys=keys)


def _melted(table: str, record: Record, *, keys: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """One row for each value of ``record`` that is no key."""
    place = tuple(_field(record[key]) if key in keys and key in record else "" for key in _KEYS)
    item = next((record[key] for key in _ITEMS if key in keys and key in record), "")
    for metric, value in record.items():
        if metric not in keys:
            yield (table, *place, item, metric, _field(value))


def _field(value: Any) -> Any:
    """A value as one field: lists with semicolons, so that commas stay the separator of the file."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_field(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(str(_field(one)) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value
