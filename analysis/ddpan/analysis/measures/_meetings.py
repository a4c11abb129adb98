"""Moments that ranks share: the collectives that they leave together, from which their clocks are aligned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Run, load
from ._inference import Matrix
from .facts import Facts

__all__ = ["Meetings", "other_meetings", "step_meetings"]

_MOST: Final = 4096
"""Collectives of a group that are looked at; of more, an even sample."""

_LEFT_TOGETHER: Final = ("all_reduce", "all_gather", "all_to_all", "barrier", "reduce_scatter")
"""Collectives that no rank can leave before all have come; a broadcast's root can."""

_KEYS: Final = ("launch_ns", "end_ns")


@dataclass(frozen=True)
class Meetings:
    """Collectives of one group, in their order.

    Attributes:
        module: DDP module whose steps they end; None for collectives that are no buckets.
        group: number of the process group as its lowest rank calls it; None if its metadata do not tell.
        ranks: the ranks that recorded any, ascending; the columns.
        launch_ns: when each rank launched it, since the rank's base, shape (collectives, ranks), NaN where unknown.
        end_ns: when each rank left it, likewise.
        judged: which collectives are no warm-up, shape (collectives,).
    """

    module: int | None
    group: int | None
    ranks: tuple[int, ...]
    launch_ns: Matrix
    end_ns: Matrix
    judged: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.end_ns)


def step_meetings(run: Run, facts: Facts, base_ns: dict[int, int]) -> list[Meetings]:
    """The last buckets of the steps, by module and process group.

    Args:
        run: the run.
        facts: its facts.
        base_ns: by rank, the moment on its clock from which its times count; ranks are added as they are met.
    """
    launch = pl.col("step_end_ns") - (pl.col("step_time_ns") - pl.col("arrival_ns"))
    rows = facts.steps.lazy().filter(pl.col("step_end_ns").is_not_null())
    rows = rows.select("module", "rank", "warmup", order="step", launch_ns=launch, end_ns="step_end_ns")
    # A step lies in the sample of all ranks or of none.
    rows = rows.filter(pl.col("order") % (facts.step_count // _MOST + 1) == 0)
    found = []
    for (module,), of_module in rows.collect().partition_by("module", as_dict=True, maintain_order=True).items():
        numbers = {rank: _number(run, rank, int(module)) for rank in of_module["rank"].unique().to_list()}
        for ranks in _groups(run, numbers):
            mine = of_module.filter(pl.col("rank").is_in(ranks))
            found.append(_meetings(int(module), numbers[ranks[0]], mine, base_ns))
    return found


def other_meetings(run: Run, base_ns: dict[int, int]) -> list[Meetings]:
    """Collectives that are no buckets, by process group; ``base_ns`` is as for `step_meetings`."""
    # Where steps were chosen, the run leaves out what belongs to no step.
    whole = run if run.step_range is None else load(run.path, run=run.id, ranks=run.ranks)
    shared = pl.col("op").cast(pl.String).is_in(_LEFT_TOGETHER) & pl.col("end_ns").is_not_null()
    rows = whole.collectives().filter(pl.col("module").is_null() & shared)
    found = []
    for number, count in _counts(rows).items():
        sample = (pl.col("group") == number) & (pl.col("seq") % (count // _MOST + 1) == 0)
        columns = {"order": "seq", "launch_ns": "launch_ns", "end_ns": "end_ns"}
        frame = rows.filter(sample).select("rank", warmup=pl.lit(False), **columns).collect()
        groups = _groups(run, dict.fromkeys(frame["rank"].unique().to_list(), number))
        found += [_meetings(None, number, frame.filter(pl.col("rank").is_in(ranks)), base_ns) for ranks in groups]
    return found


def _counts(rows: pl.LazyFrame) -> dict[int, int]:
    """How many collectives of each group number the rank with most of them has."""
    by_rank = rows.group_by("group", "rank").agg(count=pl.len())
    return dict(by_rank.group_by("group").agg(pl.col("count").max()).sort("group").collect().iter_rows())


def _groups(run: Run, numbers: Mapping[int, int | None]) -> Iterator[list[int]]:
    """The ranks of ``numbers`` that are in one process group, by the number that each calls it, if they are several."""
    recorded: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, number in sorted(numbers.items()):
        group = run.metadata[rank]["groups"].get(str(number))
        # Where the metadata do not tell, all ranks are taken to be in it.
        recorded[tuple(sorted(group["ranks"])) if group else ()].append(rank)
    return (ranks for ranks in recorded.values() if len(ranks) > 1)


def _meetings(module: int | None, group: int | None, rows: pl.DataFrame, base_ns: dict[int, int]) -> Meetings:
    order, of_row = np.unique(rows["order"].to_numpy(), return_inverse=True)
    ranks = np.unique(rows["rank"].to_numpy())
    column = np.searchsorted(ranks, rows["rank"].to_numpy())
    for rank, first in rows.group_by("rank").agg(pl.col("end_ns").first()).iter_rows():
        base_ns.setdefault(rank, first)
    base = np.array([base_ns[rank] for rank in ranks.tolist()], np.int64)
    grids = {name: np.full((len(order), len(ranks)), np.nan) for name in _KEYS}
    for name, grid in grids.items():
        known = rows[name].is_not_null().to_numpy()
        # Subtracted while whole numbers are still exact.
        moments = rows[name].fill_null(0).to_numpy() - base[column]
        grid[of_row[known], column[known]] = moments[known]
    judged = np.ones(len(order), np.bool_)
    judged[of_row[rows["warmup"].to_numpy()]] = False
    return Meetings(module, group, tuple(ranks.tolist()), grids["launch_ns"], grids["end_ns"], judged)


def _number(run: Run, rank: int, module: int) -> int | None:
    """The number of the process group in which ``rank`` reduces the gradients of ``module``."""
    info: Mapping[str, Any] = run.metadata[rank]["modules"].get(str(module), {})
    return info.get("group")
