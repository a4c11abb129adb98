"""What the commands on one measure have in common: the same options, and one way to print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddpan.analysis.reports import DOCUMENTS, console

from ._options import rank_set, step_range
from ._output import check_output, emit
from ._terminal import terminal_for

if TYPE_CHECKING:
    from ddpan.analysis.reports.document import Document

__all__ = ["print_document", "run_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def run_options(function: _Function) -> _Function:
    """Give a command the argument LOGS and the options that choose a run, a part of it and the form of the report."""
    decorators = (
        click.argument("logs", type=click.Path(path_type=Path)),
        click.option(
            "--format", "form", type=click.Choice(list(DOCUMENTS)), default="text", help="Form; text by default."
        ),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            type=click.Path(dir_okay=False, path_type=Path),
            callback=check_output,
            help="Write the report into this file.",
        ),
        click.option(
            "--run", metavar="ID", help="Run to look at, by its id or the beginning of it; the newest by default."
        ),
        click.option(
            "--steps", metavar="A:B", callback=step_range, help="Only the steps from A up to, not including, B."
        ),
        click.option("--ranks", metavar="0,3-7", callback=rank_set, help="Only these ranks."),
        click.option(
            "--skip-warmup",
            metavar="N",
            type=click.IntRange(min=0),
            help="Leave out the first N steps; by default those before DDP has settled its buckets, and at least 2.",
        ),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def print_document(document: Document, form: str, output: Path | None) -> None:
    """Print ``document`` in the format ``form``, to ``output`` or, without one, to standard output."""
    if form == "text":
        text = console.render_document(document, terminal=terminal_for(output))
    else:
        text = DOCUMENTS[form](document)
    emit(text, output)
