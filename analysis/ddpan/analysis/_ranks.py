"""One rank's folder in a log: which files it holds, whose they are, and what is wrong with them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import polars as pl
from polars.exceptions import PolarsError

from ddpan.collector.schema import (
    LIVE_METADATA,
    METADATA_KEY,
    SCHEMA_VERSION,
    TABLES,
    Metadata,
    Spool,
    SpoolError,
    part_name,
    read_spool,
)

from ._problems import Problem
from ._tables import is_complete_part

__all__ = ["RankLog", "Segment", "holds_log", "read_rank"]

_PART: Final = re.compile(r"^(steps|collectives)-(\d{6,})\.parquet$")
_SPOOL: Final = re.compile(r"^live-(\d{6,})\.spool$")
_UNKNOWN: Final[dict[str, Any]] = {
    "schema_version": SCHEMA_VERSION,
    "local_rank": 0,
    "world_size": 0,
    "host": "unknown",
    "pid": 0,
    "device": "unknown",
    "backend": "unknown",
    "tap": "unknown",
    "versions": {},
    "job": {"id": None, "restart": 0},
    "clock": {"anchor_monotonic_ns": 0, "anchor_epoch_ns": 0, "uncertainty_ns": 0},
    "groups": {},
    "modules": {},
    "layouts": {},
    "counters": {"dropped": {}, "errors": 0, "late_ends": 0, "removed_parts": 0, "spool_repairs": 0},
    "settings": {},
    "closed": False,
}


@dataclass(frozen=True)
class Segment:
    """The files that hold one stretch of a rank's log: for each table a part or a spool, or None where it is lost."""

    number: int
    steps: Path | None
    collectives: Path | None

    def file(self, table: str) -> Path | None:
        """The file of ``table``."""
        return self.steps if table == "steps" else self.collectives


@dataclass(frozen=True)
class RankLog:
    """The log of one rank of one run.

    Attributes:
        folder: where the files lie.
        metadata: the newest metadata, its counters brought up to date from the spool.
        segments: in order of their numbers.
        removed: segments that were removed to keep the log within its limit.
        problems: what is wrong with the files.
    """

    folder: Path
    metadata: Metadata
    segments: tuple[Segment, ...]
    removed: int
    problems: tuple[Problem, ...]

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.metadata["run"]

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.metadata["rank"]


def holds_log(names: list[str]) -> bool:
    """Whether a folder with files of these ``names`` is a rank's."""
    return any(_PART.match(name) or _SPOOL.match(name) for name in names)


def read_rank(folder: Path) -> tuple[RankLog | None, tuple[Problem, ...]]:
    """Find out what a rank's folder holds, reading little more than the ends of its files.

    Returns:
        the rank's log with its own problems, or None and the reasons why nothing of it can be used.
    """
    files = _Files(folder)
    metadata = files.newest_metadata()
    if metadata is None:
        return None, (*files.problems, Problem("unreadable_rank", f"{folder} holds no readable file: it is left out"))
    if metadata["schema_version"] > SCHEMA_VERSION:
        return None, (Problem("newer_schema", _newer(folder, metadata["schema_version"])),)
    rank = (metadata["rank"],)
    problems = tuple(replace(problem, ranks=rank) for problem in [*files.problems, *files.gaps(metadata)])
    return RankLog(folder, metadata, files.segments(), files.removed(metadata), problems), ()


class _Files:
    """The files of one folder, each looked at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.parts: dict[tuple[str, int], Path] = {}
        self.spools: dict[int, Spool] = {}
        self._named: set[tuple[str, int]] = set()
        self._look()

    def segments(self) -> tuple[Segment, ...]:
        """The segments in order; one without any readable file is left out."""
        numbers = sorted({number for _, number in self._named})
        found = (Segment(n, *(self._file(table, n) for table in TABLES)) for n in numbers)
        return tuple(segment for segment in found if segment.steps or segment.collectives)

    def newest_metadata(self) -> Metadata | None:
        """Metadata of ``live.json`` while there is a spool, else of the highest part; None if none is readable."""
        raw = self._live() if self.spools or not self.parts else None
        for key in sorted(self.parts, key=lambda key: key[1], reverse=True):
            raw = raw or self._of_part(self.parts[key])
        if raw is None and self.spools:
            spool = self.spools[max(self.spools)]
            raw = {"run": spool.run, "rank": spool.rank, "world_size": spool.world_size, "host": spool.host}
        return None if raw is None else _with_counters(cast(Metadata, {**_UNKNOWN, **raw}), list(self.spools.values()))

    def removed(self, metadata: Metadata) -> int:
        """Whole segments that are gone because the user limited the size of the log."""
        if not metadata["settings"].get("limit"):
            return 0
        numbers = {number for _, number in self._named}
        return max(numbers, default=-1) + 1 - len(numbers)

    def gaps(self, metadata: Metadata) -> list[Problem]:
        """A problem for the files that should be there by their numbers, and are not."""
        numbers = {number for _, number in self._named}
        expected = numbers if self.removed(metadata) else range(max(numbers, default=-1) + 1)
        missing = [
            part_name(table, number)
            for number in sorted(expected)
            for table in TABLES
            if (table, number) not in self._named
        ]
        if not missing:
            return []
        some = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        return [Problem("gap_in_parts", f"{self.folder} lacks {some}: what they held is missing")]

    def _file(self, table: str, number: int) -> Path | None:
        part = self.parts.get((table, number))
        spool = self.spools.get(number)
        return part if part is not None else spool.path if spool is not None else None

    def _look(self) -> None:
        names = sorted(path.name for path in self.folder.iterdir())
        for name in names:
            if match := _PART.match(name):
                self._named.add((match[1], int(match[2])))
                self._look_at_part(match[1], int(match[2]))
        for name in names:
            if (match := _SPOOL.match(name)) and not all((t, int(match[1])) in self.parts for t in TABLES):
                self._named.update((table, int(match[1])) for table in TABLES)
                self._look_at_spool(self.folder / name, int(match[1]))

    def _look_at_part(self, table: str, number: int) -> None:
        path = self.folder / part_name(table, number)
        try:
            if is_complete_part(path):
                self.parts[table, number] = path
            else:
                self._report("truncated_part", f"{path} is truncated or no Parquet file at all, and left out")
        except OSError as error:
            self._report("unreadable_file", f"{path} cannot be read ({error.strerror or error}) and is left out")

    def _look_at_spool(self, path: Path, number: int) -> None:
        try:
            self.spools[number] = read_spool(path)
        except SpoolError as error:
            self._report("truncated_spool", f"{error}; it is left out")
        except OSError as error:
            self._look_for_successors(path, number, error)
        else:
            if self.spools[number].truncated:
                self._report("truncated_spool", f"{path} is truncated: its end is lost, what comes before is read")

    def _look_for_successors(self, path: Path, number: int, error: OSError) -> None:
        """A spool that is gone may just have been turned into parts by the process that writes it."""
        tables = [table for table in TABLES if (self.folder / part_name(table, number)).exists()]
        for table in tables:
            self._look_at_part(table, number)
        if not tables or not isinstance(error, FileNotFoundError):
            self._report("unreadable_file", f"{path} cannot be read ({error.strerror or error}) and is left out")

    def _live(self) -> dict[str, Any] | None:
        try:
            return _identified(json.loads((self.folder / LIVE_METADATA).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._report("unreadable_file", f"{self.folder / LIVE_METADATA} cannot be read ({error}) and is left out")
            return None

    def _of_part(self, path: Path) -> dict[str, Any] | None:
        try:
            return _identified(json.loads(pl.read_parquet_metadata(path).get(METADATA_KEY, "{}")))
        except (OSError, ValueError, PolarsError) as error:
            self._report("unreadable_file", f"the metadata of {path} cannot be read ({error})")
            return None

    def _report(self, kind: str, message: str) -> None:
        self.problems.append(Problem(kind, message))


def _identified(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not {"run", "rank"} <= raw.keys():
        raise ValueError("it names neither run nor rank, so it is not ddpan's")
    return raw


def _with_counters(metadata: Metadata, spools: list[Spool]) -> Metadata:
    """Raise the counters to those in the spools' headers, which are newer; all of them only ever grow."""
    counters = {**_UNKNOWN["counters"], **metadata["counters"]}
    dropped = dict(counters["dropped"])
    for spool in spools:
        for name, value in spool.counters.items():
            if name.startswith("dropped_"):
                reason = name.removeprefix("dropped_")
                dropped[reason] = max(dropped.get(reason, 0), value)
            elif name in counters:
                counters[name] = max(counters[name], value)
    return cast(Metadata, {**metadata, "counters": {**counters, "dropped": dropped}})


def _newer(folder: Path, version: int) -> str:
    return f"{folder} has format version {version}, this ddpan reads up to {SCHEMA_VERSION}: upgrade ddpan to read it"
