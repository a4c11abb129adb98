"""Keeping a rank's log within a number of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .schema import SPOOL_PATTERN, TABLES, part_name

__all__ = ["POLICIES", "Limit", "Retention"]

POLICIES: Final = ("oldest", "sample")
SMALLEST_LIMIT_BYTES: Final = 1_000_000
_FORM: Final = re.compile(r"(\d+)([KMGT]?)(?:,(\w+))?", re.IGNORECASE)
_FACTORS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Limit:
    """How much a rank's log may take.

    Attributes:
        max_bytes: bytes on disk, the spool included.
        policy: ``oldest`` removes the oldest parts first and so keeps the end of the run; ``sample`` keeps one part of
            2, then of 4, and so on, and so keeps stretches of the whole run.
    """

    max_bytes: int
    policy: str = "oldest"

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read ``500M``, ``2G,sample`` or a plain number of bytes.

        Raises:
            ValueError: ``text`` is written otherwise, or is too small to hold anything.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(text)
        limit = cls(int(match[1]) * _FACTORS[match[2].upper()], (match[3] or POLICIES[0]).lower())
        if limit.policy not in POLICIES or limit.max_bytes < SMALLEST_LIMIT_BYTES:
            raise ValueError(text)
        return limit

    def __str__(self) -> str:
        return f"{self.max_bytes},{self.policy}"


class Retention:
    """Removes parts of one rank's folder where it grows beyond its limit.

    Args:
        folder: the rank's folder.
        limit: how much it may take.
        segment_bytes: size of a segment of the spool. Room for three is left free: the current one, the spare, and one
            that becomes parts.

    Attributes:
        removed: parts removed so far.
    """

    def __init__(self, folder: Path, limit: Limit, *, segment_bytes: int = 0) -> None:
        self.removed = 0
        self._folder = folder
        self._limit = limit
        self._reserve_bytes = 3 * segment_bytes
        self._stride = 1
        self._parts: dict[int, int] = {}

    def added(self, part: int, *, last: bool = False) -> None:
        """A part was written; remove what no longer has room, or the part itself if the sampling leaves it out.

        The ``last`` part of a recording stays, because its metadata tells how it ended. It takes the place of its own
        segment, which was larger, so nothing else has to go for it.

        Raises:
            OSError: a part cannot be looked at or removed.
        """
        self._parts[part] = sum(path.stat().st_size for path in self._files(part))
        if last:
            return
        if part % self._stride:
            self._remove(part)
        spool_bytes = sum(path.stat().st_size for path in self._folder.glob(SPOOL_PATTERN))
        room = self._limit.max_bytes - max(spool_bytes, self._reserve_bytes)
        while len(self._parts) > 1 and sum(self._parts.values()) > room:
            self._thin_out()

    def _thin_out(self) -> None:
        if self._limit.policy == "oldest":
            self._remove(min(self._parts))
            return
        self._stride *= 2
        for part in [part for part in self._parts if part % self._stride]:
            self._remove(part)

    def _remove(self, part: int) -> None:
        for path in self._files(part):
            path.unlink(missing_ok=True)
        del self._parts[part]
        self.removed += 1

    def _files(self, part: int) -> list[Path]:
        return [self._folder / part_name(table, part) for table in TABLES]
