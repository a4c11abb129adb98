"""Collectives by operation, size and group, on a log written row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ddpan.analysis import Run, collectives, load
from ddpan.analysis.testing import Scenario, simulate, write_log

MS = 1_000_000
RANKS = 4
GROUPS: dict[int, dict[str, list[int]]] = {
    0: {"0": [0, 1, 2, 3], "1": [0, 1]},
    1: {"0": [0, 1, 2, 3], "1": [0, 1]},
    2: {"0": [0, 1, 2, 3], "1": [2, 3]},
    3: {"0": [0, 1, 2, 3], "1": [2, 3]},
}
Row = dict[str, Any]


def row(  # noqa: PLR0917 - a line of a table
    rank: int, group: int, seq: int, op: str, size: int, launch_ms: float, took_ms: float
) -> Row:
    launch_ns = int((1000 + launch_ms) * MS) + rank * 3_600_000 * MS  # every rank has a clock of its own
    end_ns = launch_ns + int(took_ms * MS)
    own = {"rank": rank, "group": group, "seq": seq, "op": op, "bytes": size, "launch_ns": launch_ns, "end_ns": end_ns}
    return {**own, "wait_start_ns": launch_ns}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes rows as the log of four ranks without steps."""

    def written(rows: list[Row]) -> Run:
        run = simulate(Scenario(ranks=RANKS, steps=1))
        frame = pl.DataFrame(rows, schema_overrides=dict(run.collectives.schema), infer_schema_length=None)
        table = pl.concat([run.collectives.clear(), frame], how="diagonal_relaxed").cast(run.collectives.schema)
        metadata: Any = {
            rank: {
                **one,
                "modules": {},
                "layouts": {},
                "groups": {n: {"name": n, "ranks": r, "backend": "gloo"} for n, r in GROUPS[rank].items()},
            }
            for rank, one in run.metadata.items()
        }
        changed = replace(run, collectives=table, steps=run.steps.clear(), metadata=metadata)
        return load(write_log(changed, tmp_path))

    return written


def test_bandwidth_is_that_of_nccl_tests(write: Any) -> None:
    """All ranks but the late one take 4 ms of which 2 ms are waiting: 1 MB in 3.5 ms on average, in 2 ms without."""
    took = (4, 4, 2, 4)
    ops = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    rows = [row(r, 0, s, op, 10**6, 10 * s, took[r]) for s, op in enumerate(ops) for r in range(RANKS)]
    table = {one["op"]: one for one in collectives(write(rows)).sizes.to_dicts()}
    assert table["all_reduce"]["duration_ns"] == 3.5 * MS
    assert (table["all_reduce"]["wait_ns"], table["all_reduce"]["transfer_ns"]) == (1.5 * MS, 2 * MS)
    assert table["all_reduce"]["algbw_observed"] == pytest.approx(1e6 / 3.5e-3)
    assert table["all_reduce"]["busbw_transfer"] == pytest.approx(1e6 / 2e-3 * 2 * 3 / 4)
    assert table["all_gather"]["size_bytes"] == 4 * 10**6
    assert table["all_gather"]["busbw_transfer"] == pytest.approx(4e6 / 2e-3 * 3 / 4)
    assert table["reduce_scatter"]["algbw_transfer"] == pytest.approx(1e6 / 2e-3)
    assert table["broadcast"]["busbw_observed"] == table["broadcast"]["algbw_observed"]
    assert (table["all_reduce"]["last_rank"], table["all_reduce"]["last_share"]) == (2, 1.0)
    assert (table["broadcast"]["wait_ns"], table["broadcast"]["last_rank"]) == (None, None)


def test_groups_of_one_number_are_told_apart(write: Any) -> None:
    rows = [row(r, 1, 0, "all_reduce", 64, 0, 1 + r) for r in range(RANKS)]
    table = collectives(write(rows)).sizes.sort("lowest_rank")
    assert table["ranks"].to_list() == [[0, 1], [2, 3]]
    assert table["count"].to_list() == [1, 1]
    assert table["last_rank"].to_list() == [0, 2]
    # n is the size of the group: 2(n-1)/n = 1.
    assert table["busbw_observed"].to_list() == table["algbw_observed"].to_list()


def test_straggler_is_that_of_the_comms_logger(write: Any) -> None:
    took = [(5, 3, 4, 9), (2, 8, 2, 2)]
    rows = [row(r, 0, s, "all_reduce", 64, 20 * s, took[s][r]) for s in range(2) for r in range(RANKS)]
    ranks = collectives(write(rows)).ranks
    assert ranks["straggler_ns"].to_list() == [sum(t[r] - min(t) for t in took) * MS for r in range(RANKS)]


def test_what_is_missing_is_counted_and_compared_with_nothing(write: Any) -> None:
    rows = [row(r, 0, s, "all_reduce", 64, 20 * s, 2 + (r == 1)) for s in range(3) for r in range(RANKS)]
    rows = [one for one in rows if (one["seq"], one["rank"]) != (1, 3)]
    rows[-1]["end_ns"] = None
    [one] = collectives(write(rows)).sizes.to_dicts()
    assert (one["count"], one["complete"]) == (3, 1)
    assert one["wait_ns"] == MS / 4


def test_sends_and_receives_are_not_matched(write: Any) -> None:
    rows = [row(0, 0, 0, "send", 8, 0, 1), row(1, 0, 0, "recv", 8, 0, 2), row(0, 0, 1, "send", 16, 5, 1)]
    table = collectives(write(rows)).sizes
    assert table.select("op", "bytes", "count").sort("op", "bytes").rows() == [
        ("recv", 8, 1),
        ("send", 8, 1),
        ("send", 16, 1),
    ]
    assert table["wait_ns"].null_count() == table["last_rank"].null_count() == 3


def test_an_empty_log_has_no_collectives(write: Any) -> None:
    result = collectives(write([]))
    assert result.sizes.is_empty()
    assert result.ranks.is_empty()
