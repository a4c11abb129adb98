"""Many ranks in one folder, and one rank at full speed: nothing is dropped, or it is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from ddpan.analysis import load

SCRIPT = Path(__file__).parent / "scripts" / "writers.py"


@pytest.mark.parametrize(
    ("ranks", "buckets", "lengths"),
    [pytest.param(64, 10, (40, 1000), id="64 ranks"), pytest.param(1, 50, (1000, 10_000), id="full speed")],
)
def test_every_event_is_there_or_counted(
    ranks: int, buckets: int, lengths: tuple[int, int], long: bool, tmp_path: Path
) -> None:
    steps = lengths[long]
    subprocess.run([sys.executable, SCRIPT, tmp_path, str(ranks), str(steps), str(buckets)], check=True, timeout=280)
    run = load(tmp_path)
    assert run.ranks == tuple(range(ranks))
    there = run.collectives().group_by("rank").agg(pl.len(), pl.col("seq").n_unique().alias("kinds")).collect()
    assert there["len"].equals(there["kinds"], check_names=False)
    rows = dict(there.select("rank", "len").iter_rows())
    forwards = dict(run.steps().group_by("rank").agg(pl.len()).collect().iter_rows())
    dropped = {rank: sum(run.metadata[rank]["counters"]["dropped"].values()) for rank in run.ranks}
    for rank in run.ranks:
        assert rows[rank] + forwards[rank] + dropped[rank] == steps * (buckets + 1)
        assert run.metadata[rank]["counters"]["late_ends"] == run.metadata[rank]["counters"]["errors"] == 0
    print(f"\n{ranks} ranks x {steps} steps x {buckets} buckets: {sum(dropped.values())} events dropped")  # noqa: T201
    reported = [problem.ranks for problem in run.problems if problem.kind == "dropped_events"]
    assert reported == ([tuple(rank for rank in run.ranks if dropped[rank])] if any(dropped.values()) else [])
