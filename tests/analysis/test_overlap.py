"""Overlap of communication and computation, on spans whose overlap is plain to see."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest

from ddpan.analysis.measures.overlap import overlap
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate

OpenRun = Callable[..., Run]
MS = 1_000_000
PLAIN = Scenario(ranks=2, steps=12, buckets=2, noise=0.0, transfer_noise=0.0, rebuilt=False)


def with_spans(spans_ms: list[tuple[float, float]], scenario: Scenario = PLAIN) -> SyntheticRun:
    """Buckets from one moment to another, in milliseconds after the end of each rank's forward.

    The backward computation of the scenario lasts 40 ms.
    """
    run = simulate(scenario)
    forward_end = run.steps.filter("synced").select("rank", "step", "forward_end_ns")
    spans = pl.DataFrame({"bucket": range(len(spans_ms)), "span": spans_ms}, schema_overrides={"bucket": pl.UInt16})
    times = run.collectives.join(forward_end, on=["rank", "step"], how="left").join(spans, on="bucket", how="left")
    begin, end = ((pl.col("span").list.get(i) * MS).cast(pl.Int64) + pl.col("forward_end_ns") for i in (0, 1))
    moved = times.with_columns(launch_ns=begin, ready_ns=begin, end_ns=end).select(run.collectives.columns)
    return SyntheticRun(scenario, run.steps, moved, run.metadata)


@pytest.mark.parametrize(
    ("spans", "comm", "hidden"),
    [
        ([(10, 20), (25, 35)], 20, 20),  # both within the computation
        ([(10, 20), (15, 22)], 12, 12),  # in flight together: the union counts, not the sum
        ([(10, 30), (12, 18)], 20, 20),  # one inside the other
        ([(30, 45), (35, 50)], 20, 10),  # reaching beyond the end of the computation
        ([(40, 45), (45, 52)], 12, 0),  # after it
        ([(20, 20), (20, 60)], 40, 20),  # one takes no time
    ],
)
def test_hidden_and_exposed(open_run: OpenRun, spans: list[tuple[float, float]], comm: int, hidden: int) -> None:
    found = overlap(open_run(with_spans(spans))).overall.row(0, named=True)
    assert found["n"] == 2 * 10
    assert found["comm_ns"] == comm * MS
    assert found["hidden_ns"] == hidden * MS
    assert found["exposed_ns"] == (comm - hidden) * MS
    assert found["ratio"] == pytest.approx(hidden / comm)


def test_the_logger_s_overlap_counts_gaps_and_ours_does_not(open_run: OpenRun) -> None:
    found = overlap(open_run(with_spans([(10, 12), (30, 33)]))).overall.row(0, named=True)
    assert found["c10d_overlap_ns"] == 30 * MS
    assert found["hidden_ns"] == 5 * MS
    assert found["before_first_bucket_ns"] == 10 * MS


def test_exposed_time_is_split_among_the_buckets_in_flight(open_run: OpenRun) -> None:
    # The computation ends at 40 ms. From there to 44 ms both are in flight, to 50 ms the second alone.
    found = overlap(open_run(with_spans([(30, 44), (35, 50)])))
    assert found.buckets["exposed_ns"].to_list() == [2 * MS, 8 * MS]
    step_time = found.overall["step_time_ns"][0]
    assert found.buckets["exposed_share"].to_list() == pytest.approx([2 * MS / step_time, 8 * MS / step_time])


def test_the_tail_is_from_the_last_gradient_to_the_end_of_backward(open_run: OpenRun) -> None:
    # Buckets are ready every 20 ms and take 3 ms; copying back takes 0.2 ms.
    found = overlap(open_run(PLAIN)).overall.row(0, named=True)
    assert found["tail_ns"] == pytest.approx(3.2 * MS)
    assert found["exposed_ns"] == pytest.approx(3 * MS)
    assert found["exposed_share"] == pytest.approx(3 * MS / found["step_time_ns"])


def test_the_share_of_the_step_and_the_rows_of_ranks(open_run: OpenRun) -> None:
    found = overlap(open_run(with_spans([(10, 20), (30, 50)])))
    assert found.per_rank["rank"].to_list() == [0, 1]
    assert found.per_rank["ratio"].to_list() == pytest.approx([2 / 3, 2 / 3])
    assert found.reason is None


def test_layouts_are_never_averaged(open_run: OpenRun) -> None:
    # Step 0 has one bucket, launched when all is computed: nothing of it is hidden.
    found = overlap(open_run(Scenario(ranks=2, steps=30, buckets=4), skip_warmup=0))
    assert found.overall["layout"].to_list() == [0, 1]
    assert found.overall["n"].to_list() == [2, 58]
    first, second = found.overall["ratio"].to_list()
    assert first == 0.0
    assert second > 0.5
    assert found.buckets.group_by("layout").len().sort("layout")["len"].to_list() == [1, 4]


def test_without_times_of_the_backward_there_is_no_ratio(open_run: OpenRun) -> None:
    run = simulate(PLAIN)
    steps = run.steps.with_columns(compute_end_ns=pl.lit(None, pl.Int64), backward_end_ns=pl.lit(None, pl.Int64))
    found = overlap(open_run(SyntheticRun(PLAIN, steps, run.collectives, run.metadata)))
    assert found.overall["ratio"].to_list() == [None]
    assert found.reason == "no step has both its communication and the times of its backward pass"


def test_a_run_of_warmup_alone_says_so(open_run: OpenRun) -> None:
    found = overlap(open_run(PLAIN, skip_warmup=100))
    assert found.overall.is_empty()
    assert found.reason == "no step outside warm-up was recorded"
