"""Tensor-parallel and data-parallel groups of two by two ranks: rows, groups, and who is compared with whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from click.testing import CliRunner
from tests.end_to_end.scripts.parallel import BATCH, BLOCKS, DELAY_SECONDS, LATE_FROM, LATE_GROUP, SLOW_RANK, WIDTH

from ddpan.analysis import collectives, load, stragglers
from ddpan.analysis.cli import main

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

RANKS, STEPS = 4, 40
SPLIT, REPLICAS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
LATE = tuple(LATE_GROUP)


@pytest.fixture(scope="module")
def logs(launch: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    launch("parallel", str(STEPS), ranks=RANKS, log_dir=folder)
    return folder


@pytest.fixture(scope="module")
def run(logs: Path, read_runs: Callable[[Path], list[RunLog]]) -> RunLog:
    [log] = read_runs(logs)
    return log


def own(groups: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    """The one of the groups that a rank is in."""
    return next(ranks for ranks in groups if rank in ranks)


def by_ranks(log: RankLog) -> dict[tuple[int, ...], pl.DataFrame]:
    """The rows of each group, by its ranks."""
    groups = log.metadata["groups"]
    return {tuple(info["ranks"]): log.collectives.filter(group=int(number)) for number, info in groups.items()}


def test_the_metadata_has_the_ranks_of_each_group(run: RunLog) -> None:
    for rank, log in run.ranks.items():
        expected = {tuple(range(RANKS)), own(SPLIT, rank), own(REPLICAS, rank)} | ({LATE} if rank in LATE else set())
        assert set(by_ranks(log)) == expected
        [module] = log.metadata["modules"].values()
        assert tuple(log.metadata["groups"][str(module["group"])]["ranks"]) == own(REPLICAS, rank)
        assert log.metadata["counters"]["errors"] == 0


def test_all_reduces_of_split_layers_are_rows_of_their_group(run: RunLog) -> None:
    """One in the forward and one in the backward of each block."""
    for rank, log in run.ranks.items():
        rows = by_ranks(log)[own(SPLIT, rank)]
        count = 2 * BLOCKS * STEPS
        assert rows["seq"].to_list() == list(range(count))
        assert set(rows["op"]) == {"all_reduce"}
        assert set(rows["bytes"]) == {4 * BATCH * WIDTH}
        assert rows["bucket"].null_count() == count


def test_buckets_are_rows_of_the_data_parallel_group(run: RunLog) -> None:
    for rank, log in run.ranks.items():
        rows = by_ranks(log)[own(REPLICAS, rank)].filter(pl.col("bucket").is_not_null())
        assert rows.height == log.buckets.height
        assert set(rows["step"]) == set(range(STEPS))
        of_step = rows.group_by("step").agg(pl.col("bytes").sum())
        assert set(of_step["bytes"]) == {4 * BLOCKS * (4 * WIDTH * WIDTH + 2 * WIDTH)}


def test_a_group_made_later_is_recorded_from_then_on(run: RunLog) -> None:
    for rank in LATE:
        rows = by_ranks(run.ranks[rank])[LATE]
        assert rows.select("seq", "op", "bytes").rows() == [(k, "all_reduce", 12) for k in range(STEPS - LATE_FROM)]


def test_a_rank_is_compared_with_its_replicas_only(logs: Path) -> None:
    """The slow rank holds up the one that shares its layers with it, which then comes late to its own replica.

    On a busy machine another may be named for a stretch.
    """
    [verdict] = [one for one in stragglers(load(logs)).named if one.kind == "persistent"]
    assert (verdict.rank, verdict.cause) == (SLOW_RANK, "backward")
    assert verdict.delay_ns is not None
    assert 0.5e9 * DELAY_SECONDS < verdict.delay_ns < 2e9 * DELAY_SECONDS


def test_the_table_of_collectives_has_every_group(logs: Path) -> None:
    sizes = collectives(load(logs)).sizes
    assert {tuple(ranks) for ranks in sizes["ranks"]} == {tuple(range(RANKS)), *SPLIT, *REPLICAS, LATE}
    [late] = sizes.filter(bytes=12).to_dicts()
    assert (late["count"], late["complete"]) == (STEPS - LATE_FROM,) * 2
    of_split = sizes.filter(op="all_reduce", bytes=4 * BATCH * WIDTH).sort("lowest_rank").to_dicts()
    assert [tuple(row["ranks"]) for row in of_split] == list(SPLIT)
    assert [row["complete"] for row in of_split] == [2 * BLOCKS * STEPS] * 2
    assert of_split[1]["last_rank"] == SLOW_RANK
    shown = CliRunner().invoke(main, ["collectives", str(logs)])
    assert shown.exit_code == 0
    for text in ("0-1", "2-3", "0,2", "1,3", "0,3"):
        assert text in shown.output
