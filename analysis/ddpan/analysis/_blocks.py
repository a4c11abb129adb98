"""Reading a run block by block: whole steps of all ranks at a time, each file once, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import polars as pl

from ._problems import Problem
from ._ranks import RankLog
from ._tables import empty, read_files

__all__ = ["Block", "BlockReader"]


@dataclass(frozen=True)
class Block:
    """Whole steps of all ranks: no step of a module has rows in two blocks, and steps come in ascending order.

    Attributes:
        steps: rows of the table ``steps``.
        collectives: rows of the table ``collectives``; those that belong to no step come with the files they are in.
    """

    steps: pl.DataFrame
    collectives: pl.DataFrame


class BlockReader:
    """Reads the ranks side by side, a segment at a time, and holds back what may belong to an unfinished step.

    The rows of a rank are in the order in which things happened. So once every rank has begun a step of a module, all
    earlier steps of that module have been read completely, and make a block. A rank that is ahead waits for the
    others, which bounds the memory by about two segments of each rank, whatever the length of the run.

    Args:
        logs: logs by rank.
        columns: the columns wanted of each table, ``steps`` first; rank, module and step must be among them.
        keep: filter of the rows of both tables, or None.
        progress: called with the share of the segments read so far, 0 to 1.

    Attributes:
        problems: files that turned out to be damaged, filled while the blocks are read.
    """

    def __init__(
        self,
        logs: Mapping[int, RankLog],
        *,
        columns: Mapping[str, Sequence[str]],
        keep: pl.Expr | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.problems: list[Problem] = []
        self._logs = logs
        self._columns = columns
        self._keep = keep
        self._progress = progress
        self._begin()

    def __iter__(self) -> Iterator[Block]:
        self._begin()
        while unfinished := self._unfinished():
            self._read(self._behind(unfinished))
            # Nothing here may hold on to the block while the next one is read.
            yield from self._cut()

    def _begin(self) -> None:
        self.problems.clear()
        self._next = dict.fromkeys(self._logs, 0)
        self._held = {table: empty(table, columns) for table, columns in self._columns.items()}
        self._last: dict[tuple[int, int], int] = {}
        self._advance = dict.fromkeys(self._logs, 0)

    def _unfinished(self) -> list[int]:
        return [rank for rank, log in self._logs.items() if self._next[rank] < len(log.segments)]

    def _behind(self, unfinished: list[int]) -> list[int]:
        """The ranks to read next: those that hold the next block up, and those less than half a segment ahead."""
        horizon = self._horizon(unfinished)
        lead = dict.fromkeys(unfinished, 0)
        for (rank, module), step in self._last.items():
            if rank in lead:
                lead[rank] = max(lead[rank], step - horizon[module])
        limit = min(lead.values()) + max(self._advance.values()) // 2
        return [rank for rank in unfinished if lead[rank] <= limit]

    def _horizon(self, unfinished: list[int]) -> dict[int, int]:
        """For each module the step up to which (exclusive) the ranks have been read completely."""
        modules = {module for _, module in self._last}
        return {
            module: min(
                (self._last.get((rank, module), 0) for rank in unfinished if self._has(rank, module)),
                default=1 << 32,
            )
            for module in modules
        }

    def _has(self, rank: int, module: int) -> bool:
        modules = self._logs[rank].metadata["modules"]
        return not modules or str(module) in modules or (rank, module) in self._last

    def _read(self, ranks: list[int]) -> None:
        segments = [self._logs[rank].segments[self._next[rank]] for rank in ranks]
        unnoted = set(ranks)
        for table, columns in self._columns.items():
            paths = [path for segment in segments if (path := segment.file(table)) is not None]
            frame, problems = read_files(paths, table, columns, self._keep)
            self.problems.extend(problems)
            # The small table of steps tells how far a rank has come; the other one stands in where it is lost.
            unnoted -= self._note_last(frame, unnoted)
            self._held[table] = pl.concat([self._held[table], frame], rechunk=False)
        for rank in ranks:
            self._next[rank] += 1
        if self._progress is not None:
            self._progress(sum(self._next.values()) / sum(len(log.segments) for log in self._logs.values()))

    def _note_last(self, frame: pl.DataFrame, ranks: set[int]) -> set[int]:
        """Note how far ``ranks`` have come by ``frame``; return those of them that it has rows of."""
        if not ranks:
            return set()
        rows = frame.lazy().drop_nulls("module").filter(pl.col("rank").is_in(ranks))
        seen = rows.group_by("rank", "module").agg(pl.col("step").max()).collect()
        for rank, module, step in seen.iter_rows():
            before = self._last.get((rank, module), 0)
            self._last[rank, module] = max(before, step)
            self._advance[rank] = max(step - before, 0)
        return set(seen["rank"])

    def _cut(self) -> tuple[Block] | tuple[()]:
        horizon = self._horizon(self._unfinished())
        complete = [(pl.col("module") == m) & (pl.col("step") < step) for m, step in horizon.items()]
        ready = reduce(or_, complete, pl.col("module").is_null() | pl.col("step").is_null())
        cut = {}
        for table, frame in self._held.items():
            mask = frame.select(ready.alias("ready")).to_series()
            cut[table] = frame.filter(mask)
            self._held[table] = frame.filter(~mask)
        block = Block(cut["steps"], cut["collectives"])
        return (block,) if block.steps.height or block.collectives.height else ()
