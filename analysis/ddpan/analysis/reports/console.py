"""The report as text: tables that fit a terminal, or plain lines for a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ._answer import answer
from ._contents import sections
from ._overview import run_table
from ._sections import Section, Table

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary
    from ddpan.analysis.run import RunInfo

    from .document import Document

__all__ = ["Terminal", "render", "render_document", "render_runs"]

_UNBROKEN: Final = 100_000
"""Width, in characters, at which nothing is wrapped: lines in a pipe stay whole."""

_COLOURS: Final = {"none": "green", "insufficient_data": "yellow"}


@dataclass(frozen=True)
class Terminal:
    """The terminal to print on.

    Attributes:
        width: columns of characters.
        colour: whether colours and bold type may be used.
    """

    width: int
    colour: bool


def render(summary: Summary, *, terminal: Terminal | None = None) -> str:
    """The report as text.

    Args:
        summary: the results.
        terminal: where it is shown; None for a pipe or a file: no colour, no wrapping, nothing shortened.
    """
    colour = _COLOURS.get(summary.stragglers.verdict.kind, "red")
    return _report(answer(summary), colour, sections(summary), terminal)


def render_document(document: Document, *, terminal: Terminal | None = None) -> str:
    """A report on one measure as text; ``terminal`` as in `render`."""
    return _report(document.answer, "green" if document.fine else "yellow", document.sections, terminal)


def render_runs(runs: Sequence[RunInfo], *, terminal: Terminal | None = None) -> str:
    """The list of the runs found in a folder, newest first, one line each."""
    return _text([_table(run_table(runs), ruled=terminal is not None)], terminal)


def _report(lines: Sequence[str], colour: str, shown: Iterable[Section], terminal: Terminal | None) -> str:
    headline, *rest = lines
    parts: list[RenderableType] = [Text(headline, style=f"bold {colour}"), *map(Text, rest)]
    for section in shown:
        parts += ["", *_section(section, ruled=terminal is not None)]
    return _text(parts, terminal)


def _section(section: Section, *, ruled: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(section.title, style="bold")]
    if section.facts:
        parts.append(Padding(_facts(section.facts), (0, 0, 0, 2)))
    if section.table is not None:
        parts.append(Padding(_table(section.table, ruled=ruled), (0, 0, 0, 2)))
    return [*parts, *(Padding(Text(note), (0, 0, 0, 2)) for note in section.notes)]


def _facts(facts: Sequence[tuple[str, str]]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name), Text(value))
    return grid


def _table(table: Table, *, ruled: bool) -> RichTable:
    """The table with two spaces between columns; on a terminal a line below the headings fills one of them."""
    lines, gap = (box.SIMPLE_HEAD, 1) if ruled else (None, 2)
    rich = RichTable(box=lines, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in table.columns:
        justify: JustifyMethod = "left" if column.text else "right"
        rich.add_column(Text(column.head), justify=justify, overflow="fold", no_wrap=not column.wraps)
    for row in table.rows:
        rich.add_row(*map(Text, row))
    return rich


def _text(parts: Sequence[RenderableType], terminal: Terminal | None) -> str:
    colour = terminal is not None and terminal.colour
    file = StringIO()
    console = Console(
        file=file,
        width=terminal.width if terminal else _UNBROKEN,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
    )
    console.print(Group(*parts))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
