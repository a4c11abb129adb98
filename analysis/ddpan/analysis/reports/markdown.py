"""The report as GitHub-flavoured Markdown, to paste into an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ._answer import answer
from ._contents import sections
from ._sections import Section, Table

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

    from .document import Document

__all__ = ["render", "render_document"]


def render(summary: Summary) -> str:
    """The report as Markdown; the answer first, in bold."""
    return _report(answer(summary), sections(summary))


def render_document(document: Document) -> str:
    """A report on one measure as Markdown; the answer first, in bold."""
    return _report(document.answer, document.sections)


def _report(lines: Iterable[str], shown: Iterable[Section]) -> str:
    headline, *rest = map(_escape, lines)
    blocks = [f"**{headline}**", *rest]
    for section in shown:
        blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"### {_escape(section.title)}"
    if section.facts:
        yield "\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in section.facts)
    if section.table is not None:
        yield _table(section.table)
    yield from map(_escape, section.notes)


def _table(table: Table) -> str:
    heads = tuple(column.head for column in table.columns)
    rule = tuple(":--" if column.text else "--:" for column in table.columns)
    lines = [heads, rule, *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|")


def _escape(text: str) -> str:
    """``text`` with the characters that Markdown would take for marks."""
    return "".join(f"\\{character}" if character in "\\`*_<>[]#" else character for character in text)
