"""Finding the runs below a path: rank folders are recognised by their files, runs by what the files say."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ._problems import Problem, rank_list
from ._ranks import RankLog, holds_log, read_rank
from .errors import DamagedLogError, LogError, NoLogError

__all__ = ["Found", "RunLog", "discover"]

_DEPTH: Final = 3
"""Folders below the given path that are searched: a job's folder may hold several log folders."""


@dataclass(frozen=True)
class RunLog:
    """The files of one run.

    Attributes:
        id: id of the run.
        path: the folder that holds its rank folders.
        ranks: logs by global rank.
        problems: what is wrong with the run as a whole.
    """

    id: str
    path: Path
    ranks: dict[int, RankLog]
    problems: tuple[Problem, ...]

    @property
    def start_ns(self) -> int:
        """Wall-clock time at which the first rank began to record, nanoseconds since the epoch."""
        return min(log.metadata["clock"]["anchor_epoch_ns"] for log in self.ranks.values())


@dataclass
class Found:
    """All that was found below a path.

    Attributes:
        path: the path that was searched.
        runs: newest first.
        problems: folders that could not be used at all.
    """

    path: Path
    runs: list[RunLog] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def raise_if_empty(self) -> None:
        """Raise the error that explains why no run was found, if none was."""
        if self.runs:
            return
        if not self.problems:
            raise NoLogError(
                f"no ddpan log in {self.path}: no file there is named like one; give the folder set in DDPAN_LOG_DIR"
            )
        damaged = any(problem.kind == "unreadable_rank" for problem in self.problems)
        raise _error(self.problems[0], len(self.problems), DamagedLogError if damaged else NoLogError)


def discover(path: Path) -> Found:
    """Search ``path`` and the folders below it.

    Raises:
        NoLogError: there is no such path, it is a file, or it cannot be listed.
    """
    if not path.exists():
        raise NoLogError(f"{path} does not exist; give the folder set in DDPAN_LOG_DIR")
    if not path.is_dir():
        raise NoLogError(f"{path} is a file; give the folder that holds the log, the one set in DDPAN_LOG_DIR")
    found = Found(path)
    logs: defaultdict[str, list[RankLog]] = defaultdict(list)
    for folder in _rank_folders(path, found.problems):
        log, problems = read_rank(folder)
        found.problems.extend(problems)
        if log is not None:
            logs[log.run].append(log)
    found.runs = sorted((_run(id_, ranks) for id_, ranks in logs.items()), key=lambda run: (run.start_ns, run.id))
    found.runs.reverse()
    return found


def _rank_folders(path: Path, problems: list[Problem]) -> list[Path]:
    def unlisted(error: OSError) -> None:
        message = f"{error.filename} cannot be listed ({error.strerror or error}) and is left out"
        problems.append(Problem("unreadable_file", message))

    folders = []
    for folder, below, files in os.walk(path, onerror=unlisted):
        depth = len(Path(folder).relative_to(path).parts)
        # A folder that bears a part's name is a broken part, and its neighbours are a log.
        if holds_log(files + below):
            folders.append(Path(folder))
        if depth >= _DEPTH or holds_log(files + below):
            below.clear()
    return sorted(folders)


def _run(id_: str, logs: list[RankLog]) -> RunLog:
    ranks: dict[int, RankLog] = {}
    problems = []
    for log in sorted(logs, key=lambda log: (log.rank, -len(log.segments), str(log.folder))):
        kept = ranks.setdefault(log.rank, log)
        if kept is not log:
            message = f"{log.folder} and {kept.folder} both hold rank {log.rank} of run {id_}: the first is left out"
            problems.append(Problem("duplicate_rank", message, (log.rank,)))
    world_size = max(log.metadata["world_size"] for log in ranks.values())
    if missing := sorted(set(range(world_size)) - ranks.keys()):
        message = (
            f"{rank_list(missing)} of {world_size} left no log that can be read: nothing is known of them, and any of "
            "them may be the slow one; copy the logs of all hosts into one folder"
        )
        problems.append(Problem("missing_rank", message, tuple(missing)))
    return RunLog(id_, next(iter(ranks.values())).folder.parent, ranks, tuple(problems))


def _error(first: Problem, count: int, kind: type[LogError]) -> LogError:
    more = f" (and {count - 1} more like it)" if count > 1 else ""
    return kind(first.message + more)
