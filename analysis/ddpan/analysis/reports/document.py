"""A report on one measure: what the commands beside ``ddpan summarize`` print, in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._records import Record
from ._sections import Section

__all__ = ["Document"]


@dataclass(frozen=True)
class Document:
    """The results of one measure, for people and for scripts.

    Attributes:
        answer: the first lines, a sentence or two each.
        fine: whether the answer is that all is well.
        sections: the numbers for people.
        facts: single values for scripts, by key.
        tables: tables for scripts, by name: a record for each row.
        keys: columns that tell the rows of a table apart; the others are its values.
    """

    answer: Sequence[str]
    fine: bool
    sections: Sequence[Section]
    facts: Record
    tables: Mapping[str, Sequence[Record]]
    keys: Sequence[str]
