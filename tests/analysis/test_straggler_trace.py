"""A real trace that another project published: a Megatron job with a slow last pipeline stage, and no slow rank.

Eight recorded ranks, two data-parallel peers for each of four stages, 32 sampled steps; from
ByteDance-Seed/StragglerAnalysis. Its events become the tables that docs/format.md describes: a step's gradients are one
bucket, reduced by the peers of a stage; the sampled steps follow one another, each as long as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pytest

from ddpan.analysis import clock_offsets, facts, load, stragglers, whatif
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate, write_log

FOLDER: Final = os.environ.get("DDPAN_FOREIGN_DATA")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="DDPAN_FOREIGN_DATA names no folder with recordings of others")

TRACE: Final = "straggler_analysis/trace-ST.parquet"
STAGES: Final = 4
START_NS: Final = 1_700_000_000_000_000_000
EMBEDDING: Final = 10
MOMENTS: Final = ("begin", "end")
OTHERS: Final = {"params-all-gather": "all_gather", "embedding-grads-all-reduce": "all_reduce"}


def events() -> pl.DataFrame:
    """The events with ``step`` counted from 0 and their ``begin`` and ``end`` in nanoseconds since the epoch."""
    trace = pl.read_parquet(Path(str(FOLDER)) / TRACE).with_columns(pl.col("optype").cast(pl.String))
    step = pl.col("step").rank("dense").cast(pl.Int64) - 1
    begin, duration = (pl.col(name).cast(pl.Float64) for name in ("start_ts", "duration"))
    trace = trace.with_columns(step=step, begin=begin, end=begin + duration).sort("step")
    lengths = trace.group_by("step").agg(length=pl.col("end").max()).sort("step")
    zeros = lengths.select("step", zero=pl.col("length").cum_sum().shift(1, fill_value=0.0))
    in_ns = [
        (START_NS + ((pl.col("zero") + pl.col(name)) * 1e9).round().cast(pl.Int64)).alias(name) for name in MOMENTS
    ]
    return trace.join(zeros, on="step").with_columns(in_ns).sort("rank", "begin")


def only(rows: pl.DataFrame, kind: str) -> pl.DataFrame:
    return rows.filter(optype=kind)


def steps_of(rows: pl.DataFrame, rank: int, step: int) -> Iterator[dict[str, Any]]:
    """One row for each micro-batch; the last one reduces the gradients."""
    forwards = only(rows, "forward-compute")
    for number, (begin, end) in enumerate(forwards.select("begin", "end").iter_rows()):
        last = number == forwards.height - 1
        yield {
            "rank": rank,
            "module": 0,
            "step": step,
            "micro_batch": number,
            "synced": last,
            "data_wait_ns": 0,
            "forward_start_ns": begin,
            "forward_end_ns": end,
            "compute_end_ns": only(rows, "backward-compute")["end"].max() if last else None,
            "backward_end_ns": only(rows, "grads-reduce-scatter")["end"].max() if last else None,
            "optimizer_start_ns": only(rows, "optimizer-clip-main-grad")["begin"].min() if last else None,
            "optimizer_end_ns": only(rows, "optimizer")["end"].max() if last else None,
        }


def collectives_of(rows: pl.DataFrame, rank: int, step: int) -> Iterator[dict[str, Any]]:
    stage = rank // 2
    for kind, op in OTHERS.items():
        for begin, end in only(rows, kind).select("begin", "end").iter_rows():
            group = EMBEDDING + rank % 2 if kind.startswith("embedding") else STAGES + stage
            yield {"rank": rank, "group": group, "seq": step, "op": op, "bytes": 0, "launch_ns": begin, "end_ns": end}
    for begin, end in only(rows, "grads-reduce-scatter").select("begin", "end").iter_rows():
        bucket = {"module": 0, "step": step, "bucket": 0, "layout": 0}
        times = {"ready_ns": None, "launch_ns": begin, "end_ns": end}
        yield {"rank": rank, "group": stage, "seq": step, "op": "reduce_scatter", "bytes": 0, **bucket, **times}


def metadata_of(template: Mapping[str, Any], rank: int) -> Any:
    stage = rank // 2
    peers = [2 * stage, 2 * stage + 1]
    groups = {str(stage): peers, str(STAGES + stage): peers}
    if stage in (0, STAGES - 1):
        groups[str(EMBEDDING + rank % 2)] = [rank % 2, 2 * STAGES - 2 + rank % 2]
    named = {number: {"name": number, "ranks": ranks, "backend": "nccl"} for number, ranks in groups.items()}
    module = {**template["modules"]["0"], "group": stage}
    own = {"rank": rank, "host": f"host-{rank}", "device": "cuda", "backend": "nccl"}
    return {**template, **own, "groups": named, "modules": {"0": module}, "layouts": {}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    blank = simulate(Scenario(ranks=2 * STAGES, steps=32, buckets=1, rebuilt=False))
    parts = events().partition_by("rank", "step", as_dict=True)
    steps = [row for (rank, step), rows in parts.items() for row in steps_of(rows, int(rank), int(step))]
    collectives = [row for (rank, step), rows in parts.items() for row in collectives_of(rows, int(rank), int(step))]
    converted = SyntheticRun(
        scenario=blank.scenario,
        steps=pl.DataFrame(steps, schema=blank.steps.schema),
        collectives=pl.DataFrame(collectives, schema=blank.collectives.schema),
        metadata={rank: metadata_of(one, rank) for rank, one in blank.metadata.items()},
    )
    return load(write_log(converted, tmp_path_factory.mktemp("trace")), skip_warmup=0)


def test_every_peer_is_compared_with_its_own(run: Run) -> None:
    known = facts(run)
    assert known.steps.height == 8 * 32
    assert known.steps["complete"].all()
    assert known.steps["ranks"].unique().to_list() == [2]


def test_transfer_by_durations(run: Run) -> None:
    assert facts(run).steps["transfer_ns"].median() == pytest.approx(0.0505e9, abs=0.00005e9)


def test_transfer_by_launches_on_aligned_clocks(run: Run) -> None:
    found = []
    for stage in range(STAGES):
        peers = load(run.path, ranks=(2 * stage, 2 * stage + 1), skip_warmup=0)
        clocks = clock_offsets(peers)
        rows = (
            peers.collectives().filter(pl.col("bucket") == 0).sort("seq").collect().partition_by("rank", as_dict=True)
        )
        launch, end = (
            np.stack([clocks.onto_reference(int(rank), frame[name].to_numpy()) for (rank,), frame in rows.items()])
            for name in ("launch_ns", "end_ns")
        )
        found.append(np.median(end, axis=0) - launch.max(axis=0))
    assert np.median(found) == pytest.approx(0.0505e9, abs=0.00005e9)


def test_both_estimators_agree_on_every_wait(run: Run) -> None:
    waits = clock_offsets(run).waits.filter(pl.col("module") == 0)
    assert waits["rank"].to_list() == list(range(8))
    assert waits["agree"].all()
    difference = (waits["wait_ns"] - waits["wait_by_launch_ns"]).abs()
    assert difference.max() < 20_000  # type: ignore[operator]
    assert waits["wait_ns"].max() > 2_000_000  # type: ignore[operator]


def test_clocks_are_chained_through_the_embedding_group(run: Run) -> None:
    """First and last stage share collectives; those between only send to each other, which aligns nothing."""
    clocks = clock_offsets(run)
    aligned = clocks.ranks.drop_nulls("offset_ns")
    assert aligned["rank"].to_list() == [0, 1, 6, 7]
    assert clocks.reason is not None
    assert "ranks 2, 3, 4, 5" in clocks.reason
    # The trace is on one time axis already, up to a few dozen microseconds.
    assert (aligned["offset_ns"].abs() <= aligned["error_ns"]).all()
    assert aligned["offset_ns"].abs().max() < 50_000  # type: ignore[operator]


def test_no_single_slow_rank(run: Run) -> None:
    found = stragglers(run)
    assert found.verdict.kind != "persistent"
    assert not [verdict for verdict in found.named if verdict.kind == "persistent"]


def test_little_is_explained_by_ranks(run: Run) -> None:
    """The worst rank costs half a percent of the step: not worth naming, and far from the slow stage's 18 percent."""
    assert 0.004 < whatif(run).ranks["waste"].max() < 0.006  # type: ignore[operator]
