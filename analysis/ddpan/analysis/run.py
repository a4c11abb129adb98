"""Runs: find them in a log folder, open one, read its two tables or go through it block by block.

Everything else in the analysis takes a `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path

import polars as pl

from ddpan.collector.schema import Metadata

from ._blocks import Block, BlockReader
from ._discovery import RunLog, discover
from ._problems import Problem, losses
from ._ranks import RankLog
from ._selection import check_skip_warmup, check_steps, choose_ranks, choose_run
from ._tables import SCHEMAS, read_files, scan_files
from .errors import DamagedLogError

__all__ = ["Block", "BlockReader", "Problem", "Run", "RunInfo", "find_runs", "load"]


@dataclass(frozen=True)
class RunInfo:
    """What a list of runs shows of one.

    Attributes:
        id: id of the run, one life of one default process group.
        path: folder that holds the folders of its ranks.
        start_ns: when the first rank began to record, nanoseconds since the epoch; 0 where unknown.
        job_id: the job it belongs to, as the launcher or scheduler calls it, or None.
        restart: how often the job was restarted before.
        world_size: ranks the run had.
        ranks: global ranks whose log was found.
        hosts: their hosts, sorted.
        steps: steps recorded by the first of these ranks, the most of any of its modules.
        backend: backend of the default process group.
    """

    id: str
    path: Path
    start_ns: int
    job_id: str | None
    restart: int
    world_size: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: int
    backend: str

    @property
    def start(self) -> datetime:
        """When the first rank began to record, in UTC."""
        return datetime.fromtimestamp(self.start_ns / 1e9, timezone.utc)


@dataclass(frozen=True, eq=False)
class Run:
    """One run, open for reading; `load` makes it.

    Attributes:
        id: id of the run.
        path: folder that holds the folders of its ranks.
        info: the run in short.
        ranks: global ranks that are read, ascending.
        world_size: ranks the run had.
        metadata: the newest metadata of each rank in ``ranks``.
        problems: what is wrong with the log, as far as the ends of its files tell.
        step_range: first step and the one after the last that are read, or None for all.
        skip_warmup: steps at the start that count as warm-up, or None for the automatic rule.
    """

    id: str
    path: Path
    info: RunInfo
    ranks: tuple[int, ...]
    world_size: int
    metadata: Mapping[int, Metadata]
    problems: tuple[Problem, ...]
    step_range: tuple[int, int] | None
    skip_warmup: int | None
    _logs: Mapping[int, RankLog] = field(repr=False)

    def steps(self) -> pl.LazyFrame:
        """The table ``steps`` of all ranks, rank by rank, each in the order of its log; columns as in the schema."""
        return self._scan("steps")

    def collectives(self) -> pl.LazyFrame:
        """The table ``collectives`` of all ranks, rank by rank, each in the order of its log; columns as in the schema.

        Where steps were chosen, collectives that belong to no step are all there: when they took place is known by
        their times alone.
        """
        return self._scan("collectives")

    def blocks(
        self,
        *,
        steps: Sequence[str] | None = None,
        collectives: Sequence[str] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> BlockReader:
        """Go through the run in blocks of whole steps over all ranks; each file is read once, in bounded memory.

        Args:
            steps: columns wanted of the table ``steps``, with rank, module and step among them; None for all.
            collectives: the same for the table ``collectives``.
            progress: called with the share that has been read, 0 to 1.

        Returns:
            an iterable of `Block`; its attribute ``problems`` lists files that turned out to be damaged.
        """
        columns = {"steps": steps or list(SCHEMAS["steps"]), "collectives": collectives or list(SCHEMAS["collectives"])}
        return BlockReader(self._logs, columns=columns, keep=self._keep(), progress=progress)

    def segments(self, table: str, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Go through one table segment by segment: first that of every rank, then the second of every rank, and so on.

        Args:
            table: ``steps`` or ``collectives``.
            columns: the columns wanted.

        Yields:
            the rows; files that turn out to be damaged are passed over.
        """
        for number in range(max(len(log.segments) for log in self._logs.values())):
            segments = [log.segments[number] for log in self._logs.values() if number < len(log.segments)]
            paths = [path for segment in segments if (path := segment.file(table)) is not None]
            yield read_files(paths, table, columns, self._keep())[0]

    def _scan(self, table: str) -> pl.LazyFrame:
        files = (segment.file(table) for log in self._logs.values() for segment in log.segments)
        lazy = scan_files((path for path in files if path is not None), table)
        keep = self._keep()
        return lazy if keep is None else lazy.filter(keep)

    def _keep(self) -> pl.Expr | None:
        if self.step_range is None:
            return None
        return pl.col("step").is_between(*self.step_range, closed="left") | pl.col("step").is_null()


def find_runs(path: str | PathLike[str]) -> tuple[RunInfo, ...]:
    """The runs in a log folder, newest first.

    Args:
        path: the folder set in ``DDPAN_LOG_DIR``, one above it, or the folder of one run.

    Raises:
        NoLogError: nothing there is a log that this version can read.
        DamagedLogError: there are logs, but no file of them can be read.
    """
    found = discover(Path(path))
    found.raise_if_empty()
    return tuple(_info(run) for run in found.runs)


def load(
    path: str | PathLike[str],
    *,
    run: str | None = None,
    steps: tuple[int, int] | slice | None = None,
    ranks: Iterable[int] | None = None,
    skip_warmup: int | None = None,
) -> Run:
    """Open a run; only the ends of its files are read yet.

    Args:
        path: the folder set in ``DDPAN_LOG_DIR``, one above it, or the folder of one run.
        run: id of the run, or the beginning of it; None for the newest.
        steps: the steps to read, from the first to before the second, or a slice; None for all.
        ranks: the global ranks to read; None for all that were found.
        skip_warmup: how many steps at the start of each module are warm-up. None for the rule that the first two
            steps are, and with them every step under DDP's first bucket layout where buckets were rebuilt later.

    Raises:
        UsageError: an option is out of range, or names no run or rank of the log.
        NoLogError: nothing at ``path`` is a log that this version can read.
        DamagedLogError: there are logs, but no file of them can be read.
    """
    step_range = check_steps(steps)
    check_skip_warmup(skip_warmup)
    found = discover(Path(path))
    found.raise_if_empty()
    log, problems = choose_run(found, run)
    chosen = choose_ranks(log, ranks)
    logs = {rank: log.ranks[rank] for rank in chosen}
    if not any(one.segments for one in logs.values()):
        raise DamagedLogError(f"no file of run {log.id} in {log.path} can be read; copy the log again if you can")
    metadata = {rank: one.metadata for rank, one in logs.items()}
    own = [problem for one in logs.values() for problem in one.problems]
    return Run(
        id=log.id,
        path=log.path,
        info=_info(log),
        ranks=chosen,
        world_size=_world_size(log),
        metadata=metadata,
        problems=(
            *found.problems,
            *problems,
            *log.problems,
            *own,
            *losses(metadata, {rank: one.removed for rank, one in logs.items()}),
        ),
        step_range=step_range,
        skip_warmup=skip_warmup,
        _logs=logs,
    )


def _info(log: RunLog) -> RunInfo:
    first = next(iter(log.ranks.values()))
    return RunInfo(
        id=log.id,
        path=log.path,
        start_ns=log.start_ns,
        job_id=first.metadata["job"]["id"],
        restart=first.metadata["job"]["restart"],
        world_size=_world_size(log),
        ranks=tuple(sorted(log.ranks)),
        hosts=tuple(sorted({one.metadata["host"] for one in log.ranks.values()})),
        steps=_steps(first),
        backend=first.metadata["backend"],
    )


def _world_size(log: RunLog) -> int:
    return max(one.metadata["world_size"] for one in log.ranks.values()) or len(log.ranks)


def _steps(log: RankLog) -> int:
    """Steps of the rank, from the newest segment that has any rows."""
    for segment in reversed(log.segments):
        if segment.steps is not None:
            last = read_files([segment.steps], "steps", ["step"], None)[0]["step"].max()
            if isinstance(last, int):
                return last + 1
    return 0
