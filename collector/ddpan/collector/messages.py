"""Lines that the collector says to the user, on stderr, each at most once per process."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

__all__ = ["is_full", "say", "warn_disk", "warn_once"]

_said: set[str] = set()


def say(text: str) -> None:
    """Print one line; a closed or broken stderr is no reason to fail."""
    try:
        # One write: ranks share a stderr, and `print` would leave room for another between the text and its end.
        sys.stderr.write(f"ddpan: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def warn_once(kind: str, text: str) -> None:
    """Print a warning unless one of the same kind was printed before."""
    if kind in _said:
        return
    _said.add(kind)
    say(f"warning: {text}")


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def warn_disk(folder: Path, error: OSError) -> None:
    """Say that a folder cannot be written, once for each reason."""
    why = "the disk is full" if is_full(error) else f"{error.strerror or error}"
    warn_once(
        f"disk {error.errno}",
        f"cannot write to {folder}: {why}. Recording pauses where it must, and counts what is lost; training goes on.",
    )
