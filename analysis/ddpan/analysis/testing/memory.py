"""A simulated run opened as it is, without a log on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from .._blocks import Block, BlockReader
from .._tables import SCHEMAS
from ..run import Run, RunInfo
from .simulation import SyntheticRun

__all__ = ["open_run"]


def open_run(run: SyntheticRun, *, skip_warmup: int | None = None) -> Run:
    """Open ``run`` as if it had been written as a log and loaded, many times faster; for tests of many runs.

    Args:
        run: the simulated run.
        skip_warmup: as in `ddpan.analysis.load`.
    """
    first = next(iter(run.metadata.values()))
    ranks = tuple(sorted(run.metadata))
    info = RunInfo(
        id=run.scenario.run,
        path=Path(run.scenario.run),
        start_ns=run.scenario.start_ns,
        job_id=first["job"]["id"],
        restart=first["job"]["restart"],
        world_size=first["world_size"],
        ranks=ranks,
        hosts=tuple(sorted({one["host"] for one in run.metadata.values()})),
        steps=run.scenario.steps,
        backend=first["backend"],
    )
    return _RunInMemory(
        id=info.id,
        path=info.path,
        info=info,
        ranks=ranks,
        world_size=info.world_size,
        metadata=run.metadata,
        problems=(),
        step_range=None,
        skip_warmup=skip_warmup,
        _logs={},
        _tables={"steps": run.steps, "collectives": run.collectives},
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _RunInMemory(Run):
    _tables: Mapping[str, pl.DataFrame]

    def blocks(
        self,
        *,
        steps: Sequence[str] | None = None,
        collectives: Sequence[str] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> BlockReader:
        columns = {"steps": steps or list(SCHEMAS["steps"]), "collectives": collectives or list(SCHEMAS["collectives"])}
        block = Block(**{table: self._tables[table].select(names) for table, names in columns.items()})
        return _OneBlock(block, columns, progress)

    def segments(self, table: str, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        yield self._tables[table].select(columns)

    def _scan(self, table: str) -> pl.LazyFrame:
        return self._tables[table].lazy()


class _OneBlock(BlockReader):
    def __init__(
        self, block: Block, columns: Mapping[str, Sequence[str]], progress: Callable[[float], None] | None
    ) -> None:
        super().__init__({}, columns=columns, progress=progress)
        self._block = block

    def __iter__(self) -> Iterator[Block]:
        yield self._block
        if self._progress is not None:
            self._progress(1.0)
