"""``ddpan collectives``: every collective by operation, size and process group."""

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
  ddpan collectives logs
  ddpan collectives logs --format csv --output collectives.csv
"""


@click.command(
    name="collectives", short_help="Show all collectives by operation, size and process group.", epilog=_EPILOG
)
@run_options
def command(*, logs: Path, form: str, output: Path | None, **options: Any) -> None:
    """Show the collectives in LOGS by operation, size and process group: count, time, bandwidth, and who came last.

    LOGS is the folder that DDPAN_LOG_DIR named during training. Warm-up is not left out, so that the counts are those
    of the whole run.
    """
    # Loaded on use: ddpan summarize needs none of it.
    from ddpan.analysis.reports.collectives import collectives_document

    with progress(f"Reading {logs}") as advance:
        run = analysis.load(logs, **options)
        result = analysis.collectives(run, progress=advance)
    print_document(collectives_document(run, result), form, output)
