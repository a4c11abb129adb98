"""``ddpan stragglers``: the verdict, and every rank against the others."""

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
  ddpan stragglers logs
  ddpan stragglers logs --steps 1000: --format csv
"""


@click.command(name="stragglers", short_help="Say which ranks are late, and show all of them.", epilog=_EPILOG)
@run_options
def command(*, logs: Path, form: str, output: Path | None, **options: Any) -> None:
    """Say which ranks are late in the run in LOGS, how sure that is, and show every rank against the others.

    LOGS is the folder that DDPAN_LOG_DIR named during training.
    """
    # Loaded on use: ddpan summarize needs none of it.
    from ddpan.analysis.reports.stragglers import stragglers_document

    with progress(f"Reading {logs}") as advance:
        run = analysis.load(logs, **options)
        analysis.facts(run, progress=advance)
        result = analysis.stragglers(run)
    print_document(stragglers_document(run, result), form, output)
