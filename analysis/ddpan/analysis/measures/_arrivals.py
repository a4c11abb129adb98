"""The facts that a comparison of ranks starts from, as arrays of one row per step and one column per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Run
from ._inference import Matrix, median, row_means
from ._own_time import own_time
from .facts import Facts
from .verdict import Cause

__all__ = ["PHASES", "Arrivals", "find_arrivals"]

PHASES: Final[tuple[Cause, ...]] = ("data", "forward", "backward", "optimizer", "other")
"""Parts of a rank's way from the start of a step to the launch of its last bucket, in the order of the columns."""

_LEAST_COVERAGE: Final = 0.25


@dataclass(frozen=True)
class Arrivals:
    """The ranks of one module that can be compared, in the steps that are no warm-up.

    Attributes:
        module: number of the module.
        members: global ranks of its process group, whether recorded or not.
        ranks: those that are compared, ascending; the columns.
        silent: members that are not compared although they took part, and why. Any of them may be the slow one.
        steps: numbers of the steps in which at least two ranks and half of them are known, ascending; the rows.
        arrival_ns: launch of the last bucket since the start of the step, without time in other collectives, shape
            (steps, ranks), NaN where unknown.
        phases_ns: the part of it spent in each of `PHASES`, by phase, of the same shape.
        step_time_ns: time of each step, shape (steps,), NaN where unknown.
        transfer_ns: what remains of each step after the latest arrival, shape (steps,): the communication that hides
            behind nothing; not finite where any rank is unknown, which may be the latest.
    """

    module: int
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    silent: Mapping[int, str]
    steps: npt.NDArray[np.int64]
    arrival_ns: Matrix
    phases_ns: Mapping[Cause, Matrix]
    step_time_ns: Matrix
    transfer_ns: Matrix

    def waits_ns(self) -> Matrix:
        """Mean time over steps that each rank waits for the latest one, shape (ranks,)."""
        return row_means((_latest(self.arrival_ns)[:, None] - self.arrival_ns).T)

    def lost_ns(self, *ranks: int) -> Matrix:
        """Time that the ranks in columns ``ranks`` made the others wait in each step, shape (steps,); NaN if unknown.

        The step would have been so much shorter had they arrived with the median of the others.
        """
        columns = list(ranks)
        own = _latest(self.arrival_ns[:, columns])
        others = _latest(np.delete(self.arrival_ns, columns, axis=1))
        return np.asarray(np.where(np.isfinite(own), np.maximum(own - others, 0.0), np.nan))

    def merged(self, columns: Sequence[int]) -> Arrivals:
        """The same with the ranks in ``columns`` as one, the first: in each step, the median of those known."""

        def merge(values: Matrix) -> Matrix:
            return np.column_stack([median(values[:, columns], axis=1), np.delete(values, columns, axis=1)])

        others = [rank for column, rank in enumerate(self.ranks) if column not in columns]
        return replace(
            self,
            ranks=(self.ranks[columns[0]], *others),
            arrival_ns=merge(self.arrival_ns),
            phases_ns={phase: merge(values) for phase, values in self.phases_ns.items()},
        )


def _latest(arrival_ns: Matrix) -> Matrix:
    """Latest of the known arrivals of each step, shape (steps,); minus infinity where none is."""
    return np.asarray(np.max(np.where(np.isnan(arrival_ns), -np.inf, arrival_ns), axis=1, initial=-np.inf))


def find_arrivals(run: Run, facts: Facts) -> list[Arrivals]:
    """The ranks of ``run`` that can be compared with each other: one `Arrivals` per module and process group."""
    found = []
    steps = own_time(run)
    for module in steps["module"].unique().sort():
        rows = steps.filter((pl.col("module") == module) & ~pl.col("warmup"))
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in run.ranks:
            if (members := _members(run, rank, module)) is not None:
                groups[members].append(rank)
        for members, recorded in sorted(groups.items()):
            silent = {rank: "its log is missing" for rank in members if rank not in run.info.ranks}
            silent |= {rank: facts.left_out[rank] for rank in recorded if rank in facts.left_out}
            found.append(_arrivals(module, members, silent, rows.filter(pl.col("rank").is_in(recorded))))
    return found


def _members(run: Run, rank: int, module: int) -> tuple[int, ...] | None:
    """Ranks of the group in which ``rank`` reduces the gradients of ``module``; None if it has no such module."""
    metadata = run.metadata[rank]
    info: Mapping[str, Any] | None = metadata["modules"].get(str(module))
    if info is None and metadata["modules"]:
        return None
    group = metadata["groups"].get(str(info["group"])) if info else None
    return tuple(sorted(group["ranks"])) if group else tuple(range(run.world_size))


def _arrivals(module: int, members: tuple[int, ...], silent: dict[int, str], rows: pl.DataFrame) -> Arrivals:
    """Lay out the rows of the facts that belong to recorded ``members``, leaving out those with too few."""
    known = rows.filter(pl.col("arrival_ns").is_not_null() & ~pl.col("rank").is_in(list(silent)))
    counts = dict(known.group_by("rank").len().iter_rows())
    enough = _LEAST_COVERAGE * max(counts.values(), default=0)
    ranks = tuple(sorted(rank for rank, count in counts.items() if count > enough))
    for rank in rows["rank"].unique():
        if rank not in ranks and rank not in silent:
            silent[rank] = f"only {counts.get(rank, 0):,} of its steps are complete"
    known = known.filter(pl.col("rank").is_in(ranks))
    present = pl.len().over("step")
    known = known.filter((present >= 2) & (2 * present >= len(ranks)) | (len(ranks) < 2))
    steps = known["step"].unique().sort().to_numpy().astype(np.int64)
    grid = _Grid(steps, np.array(ranks, np.int64), known)
    arrival, step_time = grid.spread("arrival_ns"), grid.spread("step_time_ns")
    return Arrivals(
        module=module,
        members=members,
        ranks=ranks,
        silent=silent,
        steps=steps,
        arrival_ns=arrival,
        phases_ns={phase: grid.spread(f"{phase}_ns") for phase in PHASES},
        step_time_ns=row_means(step_time),
        transfer_ns=np.min(step_time - arrival, axis=1, initial=np.inf),
    )


class _Grid:
    """Lays out columns of a table of facts as arrays of steps by ranks."""

    def __init__(self, steps: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], rows: pl.DataFrame) -> None:
        self._shape = (len(steps), len(ranks))
        self._rows = rows
        self._at = np.searchsorted(steps, rows["step"].to_numpy()), np.searchsorted(ranks, rows["rank"].to_numpy())

    def spread(self, column: str) -> Matrix:
        values = np.full(self._shape, np.nan)
        values[self._at] = self._rows[column].cast(pl.Float64).to_numpy()
        return values
