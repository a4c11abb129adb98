"""``ddpan runs``: the runs in a log folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from ddpan import analysis
from ddpan.analysis.reports import console

from ._output import emit
from ._progress import progress
from ._terminal import terminal_for

__all__ = ["command"]

_EPILOG: Final = """\b
Example:
  ddpan runs logs
"""


@click.command(name="runs", epilog=_EPILOG)
@click.argument("logs", type=click.Path(path_type=Path))
def command(*, logs: Path) -> None:
    """List the runs in the folder LOGS, the newest first.

    Every start of a training is a run of its own, restarts by torchrun or a scheduler included.
    """
    with progress(f"Looking for runs in {logs}"):
        found = analysis.find_runs(logs)
    emit(console.render_runs(found, terminal=terminal_for(None)), None)
