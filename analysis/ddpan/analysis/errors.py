"""Every error that the analysis raises on purpose.

::

    DdpanError
    ├── UsageError        the request makes no sense: an option out of range, an unknown run or rank
    └── LogError          the log does not allow an answer
        ├── NoLogError        nothing usable was found
        └── DamagedLogError   a log was found, damaged beyond an answer

A message is one line that says what was found, where, and what would fix it. The command line prints it and exits with
the class's ``exit_code``.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["DamagedLogError", "DdpanError", "LogError", "NoLogError", "UsageError"]


class DdpanError(Exception):
    """Root of the tree; catch it to catch all."""

    exit_code: ClassVar[int] = 1


class UsageError(DdpanError):
    """The request makes no sense: an option out of range, an unknown run or rank."""

    exit_code: ClassVar[int] = 2


class LogError(DdpanError):
    """The log does not allow an answer."""


class NoLogError(LogError):
    """No usable log: an empty folder, files of another kind, or logs of a newer version only."""

    exit_code: ClassVar[int] = 3


class DamagedLogError(LogError):
    """A log was found, but it is damaged beyond an answer."""

    exit_code: ClassVar[int] = 4
