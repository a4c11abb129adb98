"""Lines that the collector says to the user, on stderr, each at most once per process."""

from __future__ import annotations

import sys

__all__ = ["say", "warn_once"]

_said: set[str] = set()


def say(text: str) -> None:
    """Print one line; a closed or broken stderr is no reason to fail."""
    try:
        print(f"ddpan: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this is the one place that prints
    except (OSError, ValueError, AttributeError):
        return


def warn_once(kind: str, text: str) -> None:
    """Print a warning unless one of the same kind was printed before."""
    if kind in _said:
        return
    _said.add(kind)
    say(f"warning: {text}")
