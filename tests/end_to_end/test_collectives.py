"""Collectives issued by hand: the rows are exactly the sequence that the script issued, with whichever tap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from tests.end_to_end.scripts.collectives import BY_HAND_SECONDS

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RunLog

Row = tuple[str, int, int, int]

PLAIN: list[Row] = [
    ("all_reduce", 32, 0, 0),
    ("all_reduce", 32, 1, 0),
    ("all_reduce", 32, 0, 1),
    ("reduce", 32, 0, 2),
    ("broadcast", 32, 1, 1),
    ("all_gather", 32, 0, 3),
    ("all_gather", 32, 0, 4),
    ("reduce_scatter", 64, 0, 5),
    ("reduce_scatter", 64, 1, 2),
    ("all_to_all", 64, 0, 6),
    ("all_to_all", 64, 0, 7),
    ("gather", 32, 0, 8),
    ("scatter", 64, 0, 9),
    ("barrier", 0, 0, 10),
    ("all_reduce", 32, 0, 11),
]
COALESCED: list[Row] = [("all_reduce", 48, 2, 0), ("all_gather", 48, 2, 1), ("reduce_scatter", 96, 2, 2)]
BETWEEN_TWO: dict[int, list[Row]] = {
    0: [("send", 32, 3, 0), ("send", 8, 3, 1), ("send", 12, 3, 2), ("recv", 12, 3, 3)],
    1: [("recv", 32, 3, 0), ("recv", 8, 3, 1), ("send", 12, 3, 2), ("recv", 12, 3, 3)],
}


@pytest.fixture(scope="module")
def run(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> RunLog:
    logs = tmp_path_factory.mktemp("logs")
    launch("collectives", log_dir=logs)
    [log] = read_runs(logs)
    return log


def rows(run: RunLog, rank: int, *groups: int) -> list[Row]:
    """Operation, bytes, group and position of each row of the groups, in the order of the log."""
    of_groups = run.ranks[rank].collectives.filter(pl.col("group").is_in(groups))
    return of_groups.select("op", "bytes", "group", "seq").rows()


def test_every_collective_is_a_row(run: RunLog) -> None:
    assert rows(run, 0, 0, 1) == [*PLAIN, ("barrier", 0, 0, 12)]
    # Nobody but the root of a scatter puts anything in.
    received = [(op, 0 if op == "scatter" else size, *rest) for op, size, *rest in PLAIN]
    assert rows(run, 1, 0, 1) == [*received, ("barrier", 0, 0, 12)]


def test_every_collective_ended_and_belongs_to_no_module(run: RunLog) -> None:
    for log in run.ranks.values():
        assert log.collectives["end_ns"].null_count() == 0
        assert log.collectives["module"].null_count() == log.collectives.height
        assert [log.metadata["groups"][str(number)]["ranks"] for number in range(5)] == [[0, 1]] * 5
        assert log.metadata["counters"]["errors"] == 0


def test_coalesced_collectives_are_one_row(run: RunLog) -> None:
    assert rows(run, 0, 2) == rows(run, 1, 2) == COALESCED


def test_sends_and_receives_have_an_order_of_their_own(run: RunLog) -> None:
    assert {rank: rows(run, rank, 3) for rank in run.ranks} == BETWEEN_TWO


def test_waiting_begins_where_the_rank_stands_still(run: RunLog) -> None:
    late_ns = int(BY_HAND_SECONDS * 1e9)
    [wait] = run.ranks[0].collectives.filter(group=4).to_dicts()
    assert wait["wait_start_ns"] - wait["launch_ns"] >= late_ns
    assert wait["end_ns"] - wait["wait_start_ns"] >= late_ns
    [late] = run.ranks[1].collectives.filter(group=4).to_dicts()
    assert late["wait_start_ns"] in (None, late["launch_ns"])
