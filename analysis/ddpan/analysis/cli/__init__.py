"""The command line. Each command is one file here, which parses, calls the public functions and prints."""

from typing import Final

import click

from . import clock, collectives, demo, runs, stragglers, summarize, whatif
from ._group import CommandLine

__all__ = ["main"]

_EPILOG: Final = """\b
Example:
  DDPAN_LOG_DIR=logs torchrun --nproc-per-node 8 train.py
  ddpan summarize logs

Exit codes: 0 answered, 2 wrong usage, 3 no usable log found, 4 the log is damaged beyond an answer.
"""


@click.group(
    cls=CommandLine,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="ddpan", message="%(prog)s %(version)s")
def main() -> None:
    """Say where the time of a distributed PyTorch training went, and which rank holds up the others."""


for _module in (summarize, stragglers, whatif, collectives, clock, runs, demo):
    main.add_command(_module.command)
