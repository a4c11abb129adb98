"""The group of all commands, and the one place where an error of ddpan becomes an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ddpan.analysis.errors import DdpanError

__all__ = ["CommandLine"]


class CommandLine(click.Group):
    """A group whose commands may raise `DdpanError` and may write into a pipe that nobody reads any more."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command; after an error, print it as one line on standard error and exit with its code."""
        try:
            return super().invoke(ctx)
        except DdpanError as error:
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            _discard_output()
            ctx.exit(0)


def _discard_output() -> None:
    """Let the interpreter flush into nothing at its end: whoever read the pipe has seen all they wanted."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
