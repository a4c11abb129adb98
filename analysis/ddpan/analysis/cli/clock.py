"""``ddpan clock``: how the clocks of the hosts run against each other, and how well that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from ddpan import analysis

from ._measure import print_document, run_options
from ._progress import progress

__all__ = ["command"]

_EPILOG: Final = """\b
Examples:
  ddpan clock logs
  ddpan clock logs --format json --output clock.json
"""


@click.command(name="clock", short_help="Align the clocks of the hosts and show how well.", epilog=_EPILOG)
@run_options
def command(*, logs: Path, form: str, output: Path | None, **options: Any) -> None:
    """Align the clocks of the hosts in LOGS: offset, drift, and an error bar for each.

    LOGS is the folder that DDPAN_LOG_DIR named during training. No other number of ddpan needs clocks that agree; here
    they give a second opinion on who waits for whom.
    """
    # Loaded on use: ddpan summarize needs none of it.
    from ddpan.analysis.reports.clock import clock_document

    with progress(f"Reading {logs}") as advance:
        run = analysis.load(logs, **options)
        analysis.facts(run, progress=advance)
        offsets = analysis.clock_offsets(run)
    print_document(clock_document(run, offsets), form, output)
