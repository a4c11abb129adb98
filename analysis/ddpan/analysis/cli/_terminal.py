"""What standard output is: a terminal with its width and colours, or something that wants plain text."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from ddpan.analysis.reports.console import Terminal

__all__ = ["terminal_for"]


def terminal_for(output: Path | None) -> Terminal | None:
    """The terminal that text goes to, or None if it goes to a file, a pipe or nowhere.

    Colours respect ``NO_COLOR`` and ``TERM=dumb``.
    """
    if output is not None or sys.stdout is None or not sys.stdout.isatty():
        return None
    console = Console(file=sys.stdout)
    colour = console.color_system is not None and not console.no_color
    return Terminal(width=console.width, colour=colour)
