"""The shape of a report: headed sections of facts, one table and notes, whatever they are printed as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Column", "Section", "Table", "keys", "printable"]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its heading, with the unit of the values below it.
        text: whether the values are words, aligned to the left, and not numbers.
        wraps: whether a value may be broken into lines where a terminal is narrow; an id may not, it is copied whole.
    """

    head: str
    text: bool = False
    wraps: bool = False


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; each row has one cell per column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
        title: its heading.
        facts: pairs of a name and what is known of it.
        table: the numbers, if any.
        notes: full sentences on how to read them.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()


def printable(text: str) -> str:
    """``text`` from a log, such as a host name, without characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def keys(frame: pl.DataFrame, *names: str) -> tuple[tuple[Column, ...], Callable[[Mapping[str, Any]], tuple[str, ...]]]:
    """Columns for those of the keys ``names`` that tell rows of ``frame`` apart, and the function that fills them.

    Nearly every run has one module with one layout; a column that always says 0 would only take room.
    """
    telling = [name for name in names if frame[name].n_unique() > 1]
    return tuple(map(Column, telling)), lambda row: tuple(str(row[name]) for name in telling)
