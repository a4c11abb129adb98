"""The report as one long CSV table, a value in each row, for spreadsheets and scripts; docs/json.md describes it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from ._records import Record, run_record, tables, verdict_record
from ._sections import printable

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

    from .document import Document

__all__ = ["COLUMNS", "render", "render_document"]

_KEYS: Final = ("module", "layout", "rank", "bucket")
_NAMES: Final = ("window", "part")
"""What tells rows of a table apart beside `_KEYS`; it goes to the column ``item``."""

_NUMBERED: Final = ("changes", "problems")
"""Tables whose rows only their position tells apart."""

Row = tuple[Any, ...]

COLUMNS: Final = ("table", *_KEYS, "item", "metric", "value")
"""The header."""


def render(summary: Summary) -> str:
    """The report as CSV; an empty field where a value is not known or a key does not apply."""
    return _written([COLUMNS, *_rows(summary)])


def render_document(document: Document) -> str:
    """A report on one measure as CSV: a value in each row, as `render`, but with the keys of this measure."""
    keys = document.keys
    facts = [("facts", *("" for _ in keys), name, _field(value)) for name, value in document.facts.items()]
    values = [
        (table, *(_field(record.get(key)) for key in keys), metric, _field(value))
        for table, records in document.tables.items()
        for record in records
        for metric, value in record.items()
        if metric not in keys
    ]
    return _written([("table", *keys, "metric", "value"), *facts, *values])


def _written(rows: Iterable[Row]) -> str:
    file = StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _rows(summary: Summary) -> Iterator[Row]:
    yield from _melted("run", "", run_record(summary), keys=())
    yield from _melted("verdict", "", verdict_record(summary.stragglers.verdict), keys=())
    for number, verdict in enumerate(summary.stragglers.named):
        yield from _melted("named", number, verdict_record(verdict), keys=())
    for table, records in tables(summary).items():
        # The rank of a bucket is a result: the one that is late at it.
        keys = tuple(key for key in (*_KEYS, *_NAMES) if (table, key) != ("buckets", "rank"))
        for number, record in enumerate(records):
            item = next((record[name] for name in _NAMES if name in record), number if table in _NUMBERED else "")
            yield from _melted(table, item, record, keys=keys)


def _melted(table: str, item: int | str, record: Record, *, keys: Sequence[str]) -> Iterator[Row]:
    """One row for each value of ``record`` that is no key."""
    place = tuple(_field(record[key]) if key in keys and key in record else "" for key in _KEYS)
    for metric, value in record.items():
        if metric not in keys:
            yield (table, *place, item, metric, _field(value))


def _field(value: Any) -> Any:
    """A value as one field without line breaks; lists with semicolons, as commas separate the fields."""
    if isinstance(value, dict):
        return "; ".join(f"{_field(name)}: {_field(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(str(_field(one)) for one in value)
    if isinstance(value, str):
        return printable(value)
    return "" if value is None else value
