"""Where a command's text goes: to standard output, or into a file that is either whole or not there."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

import click

from ddpan.analysis.errors import UsageError

__all__ = ["check_output", "emit"]


def check_output(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Callback of ``--output``: refuse a file that cannot be written before any work is done for it.

    Returns:
        the file; None for standard output, for which ``-`` may be written.

    Raises:
        click.BadParameter: the folder is missing or may not be written.
    """
    if path is None or str(path) == "-":
        return None
    folder = path.resolve().parent
    if not folder.is_dir():
        raise click.BadParameter(f"folder {folder} does not exist; create it first.", ctx=ctx, param=param)
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise click.BadParameter(f"no permission to write {path}; choose another place.", ctx=ctx, param=param)
    return path


def emit(text: str, output: Path | None) -> None:
    """Write ``text`` to the file ``output``, or to standard output without one.

    Raises:
        UsageError: the place cannot be written: no permission, no space, gone.
        BrokenPipeError: standard output is a pipe whose reader has left.
    """
    try:
        if output is None:
            _print(text)
        elif _is_special(output):
            output.write_text(text, encoding="utf-8")
        else:
            _replace(output.resolve(), text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"cannot write {output or 'standard output'}: {error.strerror}") from error


def _print(text: str) -> None:
    if sys.stdout is None:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A host name that the terminal cannot show must not turn an answer into a UnicodeEncodeError.
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()


def _is_special(path: Path) -> bool:
    """Whether ``path`` is a device or a named pipe, which is written to, never replaced."""
    return path.exists() and not path.is_file()


def _replace(path: Path, text: str) -> None:
    """Write beside ``path`` first, so that a reader sees the old file or the new one, never a piece."""
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            draft.chmod(mode)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
