"""Steps left out by `DDPAN_STEPS`: the others are recorded as ever, and their collectives still join across ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import polars as pl
import pytest
from tests.end_to_end.recorded import Recorded

from ddpan.analysis import load, stragglers

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

RANKS: Final = 3
SELECTIONS: Final = {
    "2:": [*range(2, 16)],
    ":5": [*range(5)],
    "3:14,every=4": [3, 4, 7, 8, 11, 12],
    "every=5": [0, 1, 5, 6, 10, 11, 15],
}
STEPS: Final = 14
"""Of rank 0, as in scripts/selected.py; each further rank has one more and the ranks before it join."""


@pytest.fixture(scope="module")
def plain(launch: Callable[..., Outcome]) -> Outcome:
    return launch("selected", ranks=RANKS)


@pytest.fixture(scope="module", params=SELECTIONS)
def selected(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> tuple[list[int], Recorded, Path]:
    """The steps selected, the training, and its log."""
    logs = tmp_path_factory.mktemp("logs")
    outcome = launch("selected", ranks=RANKS, log_dir=logs, env={"DDPAN_STEPS": request.param})
    return SELECTIONS[request.param], Recorded(outcome, read_runs(logs)), logs


def ranks_of(recorded: Recorded) -> dict[int, RankLog]:
    [run] = recorded.runs
    return run.ranks


def test_weights_are_the_same(selected: tuple[list[int], Recorded, Path], plain: Outcome) -> None:
    _, recorded, _ = selected
    for rank in range(RANKS):
        assert recorded.outcome.facts(rank) == plain.facts(rank)


def test_selected_steps_are_recorded_whole(selected: tuple[list[int], Recorded, Path]) -> None:
    steps, recorded, _ = selected
    for rank, log in ranks_of(recorded).items():
        mine = [step for step in steps if step < STEPS + rank]
        assert log.steps["step"].to_list() == mine
        buckets = log.buckets.group_by("step").agg(pl.col("bucket").sort(), pl.col("layout").first()).sort("step")
        assert buckets["step"].to_list() == mine
        layouts = log.metadata["layouts"]["0"]
        for _, found, layout in buckets.iter_rows():
            assert found == list(range(len(layouts[str(layout)])))
        assert log.collectives["end_ns"].null_count() == 0
        assert log.metadata["counters"]["errors"] == 0


def test_collectives_join_across_ranks(selected: tuple[list[int], Recorded, Path]) -> None:
    """Each of the training's own collectives has another size, so a row beside another's would show."""
    _, recorded, _ = selected
    logs = ranks_of(recorded).values()
    joined = pl.concat(log.collectives.filter(~pl.col("op").is_in(["send", "recv"])) for log in logs)
    meetings = joined.group_by("group", "seq").agg(
        ranks=pl.len(),
        ops=pl.col("op").n_unique(),
        # A rank that joined sends zeros for a bucket, which is no bucket of a step of its own.
        steps=pl.col("step").drop_nulls().n_unique(),
        buckets=pl.col("bucket").drop_nulls().n_unique(),
        sizes=pl.col("bytes").filter(pl.col("op") != "broadcast").n_unique(),
    )
    assert meetings.filter(pl.any_horizontal(pl.col("ops", "steps", "buckets", "sizes") > 1)).is_empty()
    own = joined.filter(pl.col("bytes").is_in([4 * (200 + step) for step in range(STEPS)]), op="all_reduce")
    assert own.n_unique(["group", "seq"]) * 2 == own.height


def test_the_log_is_read_without_a_gap(selected: tuple[list[int], Recorded, Path]) -> None:
    *_, logs = selected
    run = load(logs)
    assert [
        problem for problem in run.problems if problem.kind in {"missing_rank", "recorder_errors", "gap_in_parts"}
    ] == []
    assert stragglers(run).verdict.kind in {"none", "insufficient_data"}
