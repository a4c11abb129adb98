"""``ddpan whatif``: what the steps would have taken had ranks not been late, or communication been hidden."""

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
  ddpan whatif logs
  ddpan whatif logs --top 8 --steps 1000:
"""


@click.command(name="whatif", short_help="Say what the run would have gained without late ranks.", epilog=_EPILOG)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Put up to N ranks right together.",
)
@run_options
def command(*, logs: Path, form: str, output: Path | None, top: int, **options: Any) -> None:
    """Say what the steps in LOGS would have taken had no rank been late, or one, or had communication been hidden.

    LOGS is the folder that DDPAN_LOG_DIR named during training.
    """
    # Loaded on use: ddpan summarize needs none of it.
    from ddpan.analysis.reports.whatif import whatif_document

    with progress(f"Reading {logs}") as advance:
        run = analysis.load(logs, **options)
        analysis.facts(run, progress=advance)
        result = analysis.whatif(run, top=top)
    print_document(whatif_document(run, result), form, output)
