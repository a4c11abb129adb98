"""What if: the time of a step, and what the run would have cost, had ranks not been late or communication been hidden.

The slowdown is that of ByteDance's what-if analysis (Lin et al. 2025, *Understanding stragglers in large model
training using what-if analysis*): S = T / T_ideal, where T_ideal has every rank launch its last bucket when the median
rank did, and the part of it that is wasted 1 - 1/S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from ..errors import UsageError
from ..run import Run
from ._arrivals import Arrivals, find_arrivals
from ._counterfactual import Counterfactual
from ._inference import Matrix
from .facts import Facts, facts

__all__ = ["SCENARIOS", "WhatIf", "whatif"]

SCENARIOS: Final = ("recorded", "no_rank_late", "communication_hidden")
"""Rows of ``WhatIf.scenarios``, in their order."""

_LEAST_COMPLETE: Final = 20
_KEYS: Final[dict[str, Any]] = {"module": pl.UInt16, "lowest_rank": pl.UInt32}
_COSTS: Final[dict[str, Any]] = {
    "step_time_ns": pl.Float64,
    "slowdown": pl.Float64,
    "waste": pl.Float64,
    "saved_seconds": pl.Float64,
    "saved_gpu_hours": pl.Float64,
}
_SCENARIO_SCHEMA: Final = pl.Schema({**_KEYS, "scenario": pl.String, "steps": pl.UInt32, **_COSTS})
_RANK_SCHEMA: Final = pl.Schema({**_KEYS, "rank": pl.UInt32, **_COSTS, "explained": pl.Float64})
_TOP_SCHEMA: Final = pl.Schema(
    {**_KEYS, "fixed": pl.UInt32, "ranks": pl.List(pl.UInt32), **_COSTS, "explained": pl.Float64}
)


@dataclass(frozen=True)
class WhatIf:
    """What steps would have taken.

    In all tables ``module`` and ``lowest_rank`` (of the process group) say which ranks are meant; ``step_time_ns`` is
    the mean time of a step in that case, ``slowdown`` the recorded time divided by it, ``waste`` 1 - 1 / slowdown, the
    share of the recorded time that would be saved; ``saved_seconds`` that time over all compared steps and
    ``saved_gpu_hours`` the same in hours times the ranks of the group. Warm-up is left out.

    - ``scenarios``: ``recorded``; ``no_rank_late``, with every rank at the median; ``communication_hidden``, had all
      gradient communication been hidden behind computation, null if unknown. ``steps`` is their number.
    - ``ranks``: one row per rank, had it alone arrived with the median, the costliest first. ``explained`` is the
      share of what ``no_rank_late`` saves; null if that is nothing.
    - ``top``: the same for the first one, two, ... of ``ranks`` put right together, chosen one after the other, each
      the one that saves most once those before it are right.

    Attributes:
        scenarios: see above.
        ranks: see above.
        top: see above.
        reason: why something is missing or may be too small; None if nothing is.
    """

    scenarios: pl.DataFrame
    ranks: pl.DataFrame
    top: pl.DataFrame
    reason: str | None


@dataclass(frozen=True)
class _Case:
    """The ranks of one module and group, and the steps that are replayed."""

    group: Arrivals
    replay: Counterfactual
    exposed_ns: Matrix
    whole: bool

    def key(self) -> dict[str, int]:
        return {"module": self.group.module, "lowest_rank": min(self.group.members)}

    def cost(self, step_time_ns: float | None) -> dict[str, float | None]:
        """The columns of `_COSTS` for a mean step time."""
        if step_time_ns is None:
            return dict.fromkeys(_COSTS)
        recorded = self.replay.mean_ns()
        saved_seconds = (recorded - step_time_ns) * len(self.group.steps) / 1e9
        return {
            "step_time_ns": step_time_ns,
            "slowdown": recorded / step_time_ns if step_time_ns > 0 else None,
            "waste": 1 - step_time_ns / recorded,
            "saved_seconds": saved_seconds,
            "saved_gpu_hours": saved_seconds / 3600 * len(self.group.members),
        }

    def explained(self, step_time_ns: float) -> float | None:
        recorded = self.replay.mean_ns()
        all_saved = recorded - self.ideal_ns()
        return (recorded - step_time_ns) / all_saved if all_saved > 0 else None

    def ideal_ns(self) -> float:
        return self.replay.mean_with_ns(range(len(self.group.ranks)))


def whatif(run: Run, *, top: int = 3) -> WhatIf:
    """What the steps of ``run`` would have taken had ranks not been late, or communication been hidden.

    Args:
        run: the run.
        top: up to how many ranks are put right together.

    Raises:
        UsageError: ``top`` is less than 1.
    """
    if top < 1:
        raise UsageError(f"top must be 1 or more, not {top}")
    known = facts(run)
    groups = find_arrivals(run, known)
    cases = [case for group in groups if (case := _case(known, group)) is not None]
    return WhatIf(
        scenarios=pl.DataFrame([row for case in cases for row in _scenarios(case)], schema=_SCENARIO_SCHEMA),
        ranks=pl.DataFrame([row for case in cases for row in _ranks(case)], schema=_RANK_SCHEMA),
        top=pl.DataFrame([row for case in cases for row in _top(case, top)], schema=_TOP_SCHEMA),
        reason=_reason(groups, cases),
    )


def _case(known: Facts, group: Arrivals) -> _Case | None:
    """The steps to replay: those of which all ranks are known, if they are enough, else all."""
    if len(group.ranks) < 2:
        return None
    complete = ~np.isnan(group.arrival_ns).any(axis=1)
    timed = ~np.isnan(group.step_time_ns)
    whole = int((complete & timed).sum()) >= min(_LEAST_COMPLETE, int(timed.sum()))
    rows = complete & timed if whole else timed
    if not rows.any():
        return None
    replay = Counterfactual(group.arrival_ns[rows], group.step_time_ns[rows])
    return _Case(group, replay, _exposed(known, group)[rows], whole)


def _exposed(known: Facts, group: Arrivals) -> Matrix:
    """Exposed communication of each step's least exposed rank, NaN unless all ranks are known; shape (steps,).

    The others' is longer because they wait for that rank, which hidden communication would not change.
    """
    mine = (pl.col("module") == group.module) & pl.col("rank").is_in(group.ranks)
    exposed = pl.col("exposed_ns").cast(pl.Float64)
    least = pl.when(exposed.count() == len(group.ranks)).then(exposed.min()).alias("least")
    by_step = known.steps.lazy().filter(mine).group_by("step").agg(least).collect()
    steps = pl.DataFrame({"step": group.steps}, schema={"step": pl.UInt32})
    return steps.join(by_step, on="step", how="left", maintain_order="left")["least"].fill_null(np.nan).to_numpy()


def _scenarios(case: _Case) -> Iterator[dict[str, Any]]:
    replay = case.replay
    seen = ~np.isnan(case.exposed_ns)
    hidden = replay.mean_ns() - float(case.exposed_ns[seen].mean()) if seen.any() else None
    times = (replay.mean_ns(), case.ideal_ns(), hidden)
    for scenario, time in zip(SCENARIOS, times, strict=True):
        yield {**case.key(), "scenario": scenario, "steps": len(replay.step_time_ns), **case.cost(time)}


def _ranks(case: _Case) -> Iterator[dict[str, Any]]:
    saved = case.replay.saved_ns()
    recorded = case.replay.mean_ns()
    for column in np.argsort(-saved, kind="stable"):
        time = recorded - float(saved[column])
        row = {**case.key(), "rank": case.group.ranks[column], **case.cost(time)}
        yield {**row, "explained": case.explained(time)}


def _top(case: _Case, top: int) -> Iterator[dict[str, Any]]:
    order = case.replay.costliest(top)
    for count in range(1, len(order) + 1):
        time = case.replay.mean_with_ns(order[:count])
        ranks = [case.group.ranks[column] for column in order[:count]]
        yield {**case.key(), "fixed": count, "ranks": ranks, **case.cost(time), "explained": case.explained(time)}


def _reason(groups: Sequence[Arrivals], cases: Sequence[_Case]) -> str | None:
    if not cases:
        return "no steps of two ranks or more can be compared, so nothing can be said about other arrivals"
    if silent := sorted({rank for group in groups for rank in group.silent}):
        return f"ranks {', '.join(map(str, silent))} cannot be compared; what they cost is not in these numbers"
    if not all(case.whole for case in cases):
        return "in most steps some rank is unknown; it may be the late one, so savings may be larger"
    return None
