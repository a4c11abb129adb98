"""Reading the files of a log into polars frames that have exactly the columns and types of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from ddpan.collector.schema import OPS, TABLES, Spool, SpoolError, part_name, read_spool

from ._problems import Problem

__all__ = ["SCHEMAS", "empty", "is_complete_part", "is_spool", "read_files", "scan_files", "spool_frame"]

_OP: Final = pl.Enum(OPS)
_TYPES: Final[dict[str, Any]] = {
    "u16": pl.UInt16,
    "u32": pl.UInt32,
    "u64": pl.UInt64,
    "i64": pl.Int64,
    "bool": pl.Boolean,
    "enum": _OP,
}

_ADDED: Final = frozenset({"wait_start_ns"})
"""Columns that logs of an older recorder lack."""

_MAGIC: Final = b"PAR1"

SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    table: {column.name: _TYPES[column.dtype] for column in columns} for table, columns in TABLES.items()
}
"""Columns and polars types of the two tables, in the order of the schema."""


def is_spool(path: Path) -> bool:
    """Whether ``path`` is named as a spool; otherwise it is a part."""
    return path.suffix == ".spool"


def is_complete_part(path: Path) -> bool:
    """Whether the file has the magic bytes of Parquet at both ends; the end is written last."""
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
        if file.seek(0, 2) < 3 * len(_MAGIC):
            return False
        file.seek(-len(_MAGIC), 2)
        return begin == file.read() == _MAGIC


def empty(table: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """A frame of ``table`` without rows."""
    schema = SCHEMAS[table]
    return pl.DataFrame(schema={name: schema[name] for name in columns or schema})


def spool_frame(spool: Spool, table: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """The rows of ``table`` in a spool."""
    content = spool.columns(table)
    schema = SCHEMAS[table]
    return pl.DataFrame([_series(name, *content[name]).cast(schema[name]) for name in columns or schema])


def scan_files(paths: Iterable[Path], table: str, columns: Sequence[str] | None = None) -> pl.LazyFrame:
    """Rows of ``table`` from parts and spools, in the order of ``paths``; nothing is read from parts yet."""
    frames = []
    parts: list[Path] = []
    for path in (_current(path, table) for path in paths):
        if not is_spool(path):
            parts.append(path)
            continue
        if parts:
            frames.append(_scan_parts(parts, table, columns))
            parts = []
        frames.append(spool_frame(read_spool(path), table, columns).lazy())
    if parts:
        frames.append(_scan_parts(parts, table, columns))
    return pl.concat(frames) if frames else empty(table, columns).lazy()


def read_files(
    paths: Sequence[Path], table: str, columns: Sequence[str] | None, keep: pl.Expr | None
) -> tuple[pl.DataFrame, tuple[Problem, ...]]:
    """Read the rows of ``table`` that ``keep`` selects, file by file where one of them turns out to be damaged.

    Returns:
        the rows in the order of ``paths``, and a problem for each file that could not be read.
    """
    try:
        return _read(paths, table, columns, keep), ()
    except (PolarsError, SpoolError, OSError):
        pass
    results = [_read_one(path, table, columns, keep) for path in paths]
    frames = [result for result in results if isinstance(result, pl.DataFrame)]
    problems = tuple(result for result in results if isinstance(result, Problem))
    return pl.concat([empty(table, columns), *frames]), problems


def _read_one(path: Path, table: str, columns: Sequence[str] | None, keep: pl.Expr | None) -> pl.DataFrame | Problem:
    try:
        return _read([path], table, columns, keep)
    except (PolarsError, SpoolError, OSError) as error:
        return Problem("damaged_part", f"{path} is damaged and left out: {_first_line(error)}")


def _read(paths: Sequence[Path], table: str, columns: Sequence[str] | None, keep: pl.Expr | None) -> pl.DataFrame:
    # A predicate may need columns that the caller does not want, so it comes before the selection.
    wanted = list(columns or SCHEMAS[table])
    lazy = scan_files(paths, table, None if keep is not None else wanted)
    return (lazy if keep is None else lazy.filter(keep)).select(wanted).collect()


def _current(path: Path, table: str) -> Path:
    """The file that now holds what ``path`` held: a recorder at work turns its spools into parts."""
    if is_spool(path) and not path.exists():
        return path.with_name(part_name(table, int(path.stem.split("-")[1])))
    return path


def _scan_parts(paths: Sequence[Path], table: str, columns: Sequence[str] | None) -> pl.LazyFrame:
    schema = {name: kind for name, kind in SCHEMAS[table].items() if columns is None or name in columns}
    lazy = pl.scan_parquet(list(paths), extra_columns="ignore")
    absent: frozenset[str] = frozenset()
    if not _ADDED.isdisjoint(schema):
        absent = _ADDED.intersection(schema).difference(lazy.collect_schema().names())
    return lazy.select(
        pl.lit(None, kind).alias(name) if name in absent else _typed(name, kind) for name, kind in schema.items()
    )


def _typed(name: str, kind: Any) -> pl.Expr:
    if name != "op":
        return pl.col(name).cast(kind)
    # A newer recorder may know more kinds of collectives.
    return pl.col(name).cast(kind, strict=False).fill_null(pl.lit(OPS[0], kind))


def _series(name: str, values: np.ndarray[Any, Any], missing: np.ndarray[Any, Any] | None) -> pl.Series:
    series = pl.Series(name, np.array(OPS)[values] if name == "op" else values)
    if missing is None or not missing.any():
        return series
    return series.to_frame().select(pl.when(pl.Series(~missing)).then(pl.col(name)).alias(name)).to_series()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
