"""One rank is killed in the middle of a step: the log of every rank is read to its last event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

BEFORE_THE_KILL = 150
SEGMENT = 256


class Killed:
    """The launch that was killed, and its log."""

    def __init__(self, outcome: Outcome, run: RunLog) -> None:
        self.outcome = outcome
        self.run = run

    def finished(self, rank: int) -> int:
        """Steps that the script of a rank knows to be over."""
        return int.from_bytes((self.outcome.out / f"finished-{rank}").read_bytes(), "little")


@pytest.fixture(scope="module")
def killed(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Killed:
    logs = tmp_path_factory.mktemp("logs")
    outcome = launch("killed", log_dir=logs, env={"DDPAN_SEGMENT_COLLECTIVES": str(SEGMENT)}, check=False)
    assert outcome.returncode != 0
    [run] = read_runs(logs)
    return Killed(outcome, run)


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def log(killed: Killed, rank: int) -> RankLog:
    return killed.run.ranks[rank]


def test_killed_in_the_middle(killed: Killed) -> None:
    assert all(killed.finished(rank) >= BEFORE_THE_KILL for rank in (0, 1))
    folder = killed.run.ranks[1].path
    assert list(folder.glob("*.parquet")), "the log of the killed rank should consist of parts"
    assert list(folder.glob("live-*.spool")), "and of a spool"


def test_every_finished_step_is_there(killed: Killed, log: RankLog, rank: int) -> None:
    finished = killed.finished(rank)
    steps = log.steps
    assert steps["step"].to_list() == list(range(steps.height))
    whole = steps.filter(pl.col("optimizer_end_ns").is_not_null())
    # The rank may have been killed between the end of the optimizer and the script's own note of it.
    assert whole.height in (finished, finished + 1)
    assert steps.height - whole.height in (0, 1)


def test_every_collective_is_there_once(killed: Killed, log: RankLog, rank: int) -> None:
    assert log.collectives["seq"].to_list() == list(range(log.collectives.height))
    buckets = log.buckets.filter(pl.col("step") < killed.finished(rank))
    per_step = buckets.group_by("step", maintain_order=True).agg("bucket")
    assert per_step["step"].to_list() == list(range(killed.finished(rank)))
    assert per_step["bucket"].to_list() == [[0], *([[0, 1]] * (killed.finished(rank) - 1))]
    assert buckets["end_ns"].null_count() == 0


def test_last_step_is_what_there_was_of_it(log: RankLog) -> None:
    last = log.buckets.filter(pl.col("step") == log.steps["step"].max())
    assert last["bucket"].to_list() == list(range(last.height))
    for row in log.steps.tail(1).iter_rows(named=True):
        known = [row[f"{phase}_end_ns"] is not None for phase in ("forward", "compute", "backward", "optimizer")]
        assert known == sorted(known, reverse=True), "a phase that is over has followed one that is over"


def test_metadata_of_the_killed_rank(killed: Killed) -> None:
    metadata = killed.run.ranks[1].metadata
    assert (metadata["rank"], metadata["world_size"], metadata["closed"]) == (1, 2, False)
    assert metadata["run"] == killed.run.path.name
    assert metadata["layouts"]["0"]["1"], "the buckets are described"
    assert metadata["settings"]["segment_collectives"] == SEGMENT
