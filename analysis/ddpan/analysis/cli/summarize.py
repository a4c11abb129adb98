"""``ddpan summarize``: the answer for one run, and the numbers behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddpan import analysis
from ddpan.analysis.reports import REPORTS, console

from ._measure import run_options
from ._output import emit
from ._progress import progress
from ._terminal import terminal_for

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

__all__ = ["command"]

_EPILOG: Final = """\b
Examples:
  ddpan summarize logs
  ddpan summarize logs --steps 1000: --ranks 0-7
  ddpan summarize logs --format json --output summary.json
"""


@click.command(name="summarize", short_help="Say which rank is slow, where and by how much.", epilog=_EPILOG)
@run_options
def command(
    *,
    logs: Path,
    form: str,
    output: Path | None,
    run: str | None,
    steps: slice | None,
    ranks: tuple[int, ...] | None,
    skip_warmup: int | None,
) -> None:
    """Say which rank slows down the run in LOGS, in which phase and by how much, or that none does.

    LOGS is the folder that DDPAN_LOG_DIR named during training.
    """
    with progress(f"Reading {logs}") as advance:
        loaded = analysis.load(logs, run=run, steps=steps, ranks=ranks, skip_warmup=skip_warmup)
        summary = analysis.summarize(loaded, progress=advance)
    emit(_report(summary, form, output), output)


def _report(summary: Summary, form: str, output: Path | None) -> str:
    if form == "text":
        return console.render(summary, terminal=terminal_for(output))
    return REPORTS[form](summary)
