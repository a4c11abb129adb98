"""Faults that people met in the field, each reduced to a small input with the answer that is right.

The brackets name the public report: of PyTorch, or of the tool that it was reported to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ddpan.analysis import Summary, facts, find_runs, load, overlap, statistics, stragglers, summarize
from ddpan.analysis.reports._answer import answer
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log

OpenRun = Callable[..., Run]
MS = 1_000_000


def part(summary: Summary, name: str) -> float:
    """Mean of a part of the step, in milliseconds."""
    return float(summary.step_split.filter(part=name)["mean_ns"][0]) / MS


class TestBackwardDelayEqualisedByAllReduce:
    """Rank 1 takes 200 ms longer in its backward, and every rank's backward lasts 293 ms [traceml#252]."""

    scenario = Scenario(
        backward_ns=90 * MS, noise=0.005, faults=(Fault(rank=1, cause="backward", delay_ns=200 * MS, bucket=5),)
    )

    def test_wall_times_say_nothing(self) -> None:
        steps = simulate(self.scenario).steps.filter(pl.col("step") >= 2)
        wall = (pl.col("backward_end_ns") - pl.col("forward_end_ns")).median() / MS
        by_rank = steps.group_by("rank").agg(wall.alias("wall"))["wall"]
        assert by_rank.max() - by_rank.min() < 1.0  # type: ignore[operator]
        assert by_rank.mean() == pytest.approx(293.2, abs=1.0)

    def test_the_verdict(self, open_run: OpenRun) -> None:
        verdict: Any = stragglers(open_run(self.scenario)).verdict
        assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 1, "backward")
        assert verdict.first_late_bucket == 5
        assert verdict.delay_ns == pytest.approx(200 * MS, rel=0.01)


def test_slow_loader_and_ranks_that_only_wait(open_run: OpenRun) -> None:
    """Rank 2 waits 199.7 ms for its loader, the others 10.4 ms [traceml#252]."""
    fault = Fault(rank=2, cause="data", delay_ns=round((199.7 - 10.4) * MS))
    run = simulate(Scenario(data_ns=round(10.4 * MS), noise=0.01, faults=(fault,)))
    backward = (pl.col("backward_end_ns") - pl.col("forward_end_ns")).median()
    longest = run.steps.filter(pl.col("step") >= 2).group_by("rank").agg(backward.alias("wall")).sort("wall")
    assert longest["rank"][0] == 2  # by wall time, the slow rank has the shortest backward

    found = stragglers(open_run(run))
    verdict: Any = found.verdict
    assert (verdict.rank, verdict.cause) == (2, "data")
    assert verdict.delay_ns == pytest.approx(189.3 * MS, rel=0.005)
    others = found.ranks.filter(pl.col("rank") != 2)
    assert others["backward_ns"].abs().max() < 2 * MS  # type: ignore[operator]
    assert others["wait_ns"].to_list() == pytest.approx([189.3 * MS] * 3, rel=0.01)
    assert others["last_share"].max() == 0


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("persistent", (Fault(rank=1, cause="forward", delay_ns=20 * MS),)),
        (
            "rotating",
            tuple(
                Fault(rank=step * 7 % 4, cause="forward", delay_ns=20 * MS, first_step=step, end_step=step + 1)
                for step in range(122)
            ),
        ),
        ("transient", (Fault(rank=1, cause="forward", delay_ns=60 * MS, first_step=42, end_step=82),)),
    ],
)
def test_three_runs_with_the_same_means(open_run: OpenRun, kind: str, faults: tuple[Fault, ...]) -> None:
    """One rank always late, another in each step, one in a single stretch [traceml#374]."""
    run = open_run(Scenario(steps=122, noise=0.01, faults=faults))
    verdict: Any = stragglers(run).verdict
    assert verdict.step_time_ns == pytest.approx(88.7 * MS, rel=0.01)
    assert verdict.kind == kind
    assert verdict.rank == (None if kind == "rotating" else 1)
    if kind == "transient":
        assert (verdict.first_step, verdict.last_step, verdict.affected_steps) == (42, 81, 40)
        assert verdict.delay_ns == pytest.approx(60 * MS, rel=0.02)


class TestRankWithoutBackwardTimes:
    """Rank 3 has no backward timestamps at all [traceml PR#228]."""

    @staticmethod
    def run(*faults: Fault) -> SyntheticRun:
        run = simulate(Scenario(faults=faults))
        known = pl.when(pl.col("rank") != 3)
        steps = run.steps.with_columns(known.then("compute_end_ns"), known.then("backward_end_ns"))
        return SyntheticRun(run.scenario, steps, run.collectives, run.metadata)

    def test_it_is_left_out_with_a_warning(self, open_run: OpenRun) -> None:
        found = summarize(open_run(self.run()))
        assert [problem.ranks for problem in found.problems if problem.kind == "rank_left_out"] == [(3,)]
        row = found.stragglers.ranks.filter(rank=3).row(0, named=True)
        assert row["left_out"] == "it has no times of the backward pass"
        assert (row["lateness_ns"], row["wait_ns"], row["last_share"]) == (None, None, None)
        assert found.stragglers.ranks["rank"][-1] == 3

    def test_nobody_is_cleared_as_it_may_be_the_slow_one(self, open_run: OpenRun) -> None:
        assert stragglers(open_run(self.run())).verdict.kind == "insufficient_data"

    def test_another_slow_rank_is_named_all_the_same(self, open_run: OpenRun) -> None:
        verdict: Any = stragglers(open_run(self.run(Fault(rank=0, cause="forward", delay_ns=20 * MS)))).verdict
        assert (verdict.rank, verdict.cause) == (0, "forward")


def test_rank_0_is_late_and_waits_for_nobody(open_run: OpenRun) -> None:
    """Everyone waits for rank 0, which itself waits 0 [DeepSpeed PR#3579]."""
    found = stragglers(open_run(Scenario(noise=0.0, faults=(Fault(rank=0, cause="optimizer", delay_ns=12 * MS),))))
    assert found.verdict.rank == 0
    assert found.ranks["rank"].sort().to_list() == [0, 1, 2, 3]
    waits = dict(found.ranks.select("rank", "wait_ns").iter_rows())
    assert waits == pytest.approx({0: 0, 1: 12 * MS, 2: 12 * MS, 3: 12 * MS}, rel=1e-6)


def test_a_lost_entry_and_a_sorted_list(open_run: OpenRun) -> None:
    """True straggling 4.00 ms; matching by position would pair different collectives [DeepSpeed PR#8199]."""
    run = simulate(Scenario(noise=0.0, faults=(Fault(rank=2, cause="forward", delay_ns=4 * MS),)))
    own = run.collectives.filter(pl.col("rank") == 2).sort("end_ns", "bucket", descending=[False, True])
    lost = (pl.col("step") == 50) & (pl.col("bucket") == 3)
    collectives = pl.concat([run.collectives.filter(pl.col("rank") != 2), own.filter(~lost)])
    opened = open_run(SyntheticRun(run.scenario, run.steps, collectives, run.metadata))
    verdict: Any = stragglers(opened).verdict
    assert verdict.rank == 2
    assert verdict.delay_ns == pytest.approx(4.00 * MS, abs=0.005 * MS)
    assert facts(opened).gaps["collectives_missing"].to_list() == [0, 0, 1, 0]


def test_one_rank_without_communication(open_run: OpenRun) -> None:
    """Overlap is null with the reason, and no library warns [HTA#56, #247]."""
    run = simulate(Scenario(ranks=1))
    opened = open_run(SyntheticRun(run.scenario, run.steps, run.collectives.clear(), run.metadata))
    found = overlap(opened)
    assert found.overall["ratio"].drop_nulls().is_empty()
    assert found.reason is not None
    assert found.reason.startswith("no communication was recorded")
    summary = summarize(opened)
    assert summary.stragglers.verdict.kind == "insufficient_data"
    for table in (found.overall, found.per_rank, summary.step_split, summary.statistics.overall, summary.modules):
        assert not any(table.select(pl.col(pl.Float64).is_nan().any()).row(0))


def test_buckets_of_uneven_sizes(open_run: OpenRun) -> None:
    """A bucket closes once 25 MiB are reached, so it may exceed them; the last is what is left [pytorch#48880]."""
    sizes = [2_052_000, 28_852_224, 15_853_824]
    run = simulate(Scenario(buckets=3, rebuilt=False))
    payload = pl.col("bucket").replace_strict(dict(enumerate(sizes)), return_dtype=pl.UInt64)
    for metadata in run.metadata.values():
        metadata["layouts"] = {"0": {"0": [{"bytes": size, "parameters": []} for size in sizes]}}
    found = summarize(
        open_run(SyntheticRun(run.scenario, run.steps, run.collectives.with_columns(bytes=payload), run.metadata))
    )
    assert found.problems == ()
    assert found.overlap.buckets["bytes"].to_list() == sizes
    assert found.modules["bytes"].to_list() == [sum(sizes)]
    assert found.stragglers.verdict.kind == "none"


def test_step_0_has_another_layout(open_run: OpenRun) -> None:
    """Step 0 stands apart: no average mixes layouts [pytorch PR#44798]."""
    scenario = Scenario(steps=60)
    found = summarize(open_run(scenario))
    assert found.overlap.overall["layout"].to_list() == [1]
    assert found.modules.select("steps", "warmup_steps", "first_step", "layouts", "buckets").row(0) == (60, 2, 2, 2, 8)
    everything = summarize(open_run(scenario, skip_warmup=0))
    assert everything.overlap.overall.select("layout", "n").rows() == [(0, 4), (1, 4 * 59)]
    layouts = everything.stragglers.buckets.group_by("layout").agg(pl.col("bytes").unique(), pl.len()).sort("layout")
    assert layouts["len"].to_list() == [1, 8]
    assert layouts["bytes"].to_list() == [[8 * 25 << 20], [25 << 20]]


def test_the_last_bucket_is_exposed(open_run: OpenRun) -> None:
    """7 % of each step go to the last bucket alone: named, with what would help [WeatherGenerator#1280]."""
    # The others hide behind the backward of 60 ms: 1 ms each every 10 ms. The step takes 92.2 ms, the last bucket 6.5.
    slow = Fault(rank=0, cause="collective", delay_ns=round(5.5 * MS), bucket=5)
    scenario = Scenario(
        buckets=6, backward_ns=60 * MS, transfer_ns=1 * MS, copy_ns=200_000, noise=0.005, faults=(slow,)
    )
    found = summarize(open_run(scenario))
    exposed = dict(found.overlap.buckets.select("bucket", "exposed_share").iter_rows())
    assert exposed[5] == pytest.approx(0.07, abs=0.003)
    assert max(exposed[bucket] for bucket in range(5)) < 0.002
    assert found.stragglers.verdict.kind == "none"
    advice = answer(found)[-1]
    assert re.search(r"gradient bucket 5, the last to be ready, alone takes 7\.\d % of the step", advice)
    assert "bucket_cap_mb" in advice


def test_gradient_accumulation(open_run: OpenRun) -> None:
    """Communication in each fourth forward: a cycle of four, no anomaly [pytorch#43201, Lightning#4092]."""
    found = summarize(open_run(Scenario(micro_batches=4, steps=60)))
    assert found.modules.select("steps", "micro_batches", "incomplete_steps").row(0) == (60, 4, 0)
    assert found.stragglers.verdict.kind == "none"
    assert found.problems == ()
    assert part(found, "forward") == pytest.approx(4 * 20, rel=0.02)
    assert part(found, "data") == pytest.approx(4 * 1, rel=0.02)
    slow = open_run(Scenario(micro_batches=4, steps=60, faults=(Fault(rank=3, cause="data", delay_ns=20 * MS),)))
    verdict: Any = stragglers(slow).verdict
    assert (verdict.rank, verdict.cause) == (3, "data")
    assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.1)


def test_uneven_inputs_under_join(open_run: OpenRun) -> None:
    """Rank 1 has inputs for 60 of 100 steps and joins: its statistics end there, marked [pytorch PR#42577]."""
    slow = Fault(rank=2, cause="forward", delay_ns=20 * MS)
    run = simulate(Scenario(ranks=3, steps=100, faults=(slow,)))
    joined: Any = run.metadata[1]["modules"]["0"]
    joined["joined_after_step"] = 59
    # From then on it only takes part in the collectives of the others.
    alone = (pl.col("rank") == 1) & (pl.col("step") >= 60)
    found = summarize(open_run(SyntheticRun(run.scenario, run.steps.filter(~alone), run.collectives, run.metadata)))
    forward = found.statistics.per_rank.filter(window="forward").sort("rank")
    assert forward["n"].to_list() == [98, 58, 98]
    (problem,) = (one for one in found.problems if one.kind == "joined")
    assert problem.ranks == (1,)
    assert "after step 59" in problem.message
    verdict: Any = found.stragglers.verdict
    assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 2, "forward")
    assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.03)
    steps = dict(found.stragglers.ranks.select("rank", "steps").iter_rows())
    assert steps == {0: 98, 1: 58, 2: 98}


def test_the_logger_is_one_iteration_late_and_starts_with_1953_ms(open_run: OpenRun) -> None:
    """What DDP's logger says in iteration n is our step n - 1; its first value is warm-up [pytorch#79464]."""
    run = simulate(Scenario(ranks=2, steps=30))
    first = (pl.col("step") == 0) & (pl.col("micro_batch") == 0)
    steps = run.steps.with_columns(
        forward_start_ns=pl.when(first).then(pl.col("forward_end_ns") - 1953 * MS).otherwise("forward_start_ns")
    )
    opened = open_run(SyntheticRun(run.scenario, steps, run.collectives, run.metadata))
    ours = facts(opened).steps.filter(rank=0)["c10d_forward_ns"].to_numpy()
    assert ours[0] == 1953 * MS

    # The logger records an iteration at the start of the next one, and never sees the last.
    logged = {step + 1: ours[step] for step in range(29)}
    assert logged[2] == ours[1]
    found = statistics(opened)
    forward = found.overall.filter(window="forward").row(0, named=True)
    assert forward["n"] == 2 * 28
    assert forward["max_ns"] < 25 * MS
    assert found.warmup.filter(window="forward")["max_ns"][0] == 1953 * MS
    # Averaged over all iterations, as the logger does, the first one alone would treble the mean.
    assert np.mean(list(logged.values())) > 4 * forward["mean_ns"]


class TestCodeBetweenForwardAndBackward:
    """200 ms of the user's code after the forward are inside the logger's backward compute [pytorch#53427]."""

    def test_it_is_shown_apart(self, open_run: OpenRun) -> None:
        # Each of eight buckets takes 5 ms of computation; the first is launched 200 ms late on every rank.
        everywhere = tuple(Fault(rank=rank, cause="backward", delay_ns=200 * MS, bucket=0) for rank in range(4))
        found = summarize(open_run(Scenario(noise=0.01, faults=everywhere)))
        assert part(found, "before_first_bucket") == pytest.approx(205, rel=0.01)
        assert part(found, "backward") == pytest.approx(35, rel=0.01)
        window = found.statistics.overall.filter(window="backward_compute")["mean_ns"][0]
        assert window == pytest.approx(240 * MS, rel=0.01)
        assert found.stragglers.verdict.kind == "none"

    def test_on_one_rank_alone_it_is_said_to_come_before_the_first_bucket(self, open_run: OpenRun) -> None:
        run = open_run(Scenario(faults=(Fault(rank=2, cause="backward", delay_ns=200 * MS, bucket=0),)))
        verdict: Any = stragglers(run).verdict
        assert (verdict.rank, verdict.cause, verdict.first_late_bucket) == (2, "backward", 0)
        assert "code after the forward" in verdict.reason


def test_overlapping_spans_count_once(open_run: OpenRun) -> None:
    """Two gloo spans that overlap: their union, not their sum [pytorch PR#61342]."""
    scenario = Scenario(ranks=2, steps=10, buckets=2, noise=0.0, rebuilt=False)
    run = simulate(scenario)
    forward_end = run.steps.select("rank", "step", at="forward_end_ns")
    second = pl.col("bucket") == 1
    moved = run.collectives.join(forward_end, on=["rank", "step"], how="left").with_columns(
        launch_ns=pl.col("at") + pl.when(second).then(5 * MS).otherwise(0),
        end_ns=pl.col("at") + pl.when(second).then(12 * MS).otherwise(10 * MS),
    )
    found = overlap(open_run(SyntheticRun(scenario, run.steps, moved.drop("at"), run.metadata)))
    assert found.overall["comm_ns"].to_list() == [12 * MS]


def test_a_restart_at_another_world_size(tmp_path: Path) -> None:
    """Three ranks after four, steps starting at 0 again: two attempts, nothing merged [pytorch#68014, #67615]."""
    attempts = [
        Scenario(ranks=4, steps=60, run="20260102T030405-00000001", seed=1),
        Scenario(
            ranks=3,
            steps=50,
            run="20260102T040405-00000002",
            start_ns=1_767_326_645_000_000_000,
            faults=(Fault(rank=2, cause="data", delay_ns=20 * MS),),
        ),
    ]
    for restart, scenario in enumerate(attempts):
        run = simulate(scenario)
        for metadata in run.metadata.values():
            metadata["job"] = {"id": "job-7", "restart": restart}
        write_log(run, tmp_path)

    newest, older = find_runs(tmp_path)
    assert (newest.world_size, newest.restart, newest.job_id, newest.steps) == (3, 1, "job-7", 50)
    assert (older.world_size, older.restart, older.job_id, older.steps) == (4, 0, "job-7", 60)
    second: Any = stragglers(load(tmp_path)).verdict
    assert (second.steps, second.rank) == (48, 2)
    first = stragglers(load(tmp_path, run=older.id))
    assert (first.verdict.kind, first.verdict.steps, first.ranks.height) == ("none", 58, 4)


def test_one_rank_logged_260_collectives_less(open_run: OpenRun) -> None:
    """2000 / 2000 / 1740 / 2000 collectives: matched by sequence number, the gaps counted [nccl#1945]."""
    scenario = Scenario(steps=250, rebuilt=False, faults=(Fault(rank=1, cause="optimizer", delay_ns=20 * MS),))
    run = simulate(scenario)
    lost = np.random.default_rng(5).choice(2000, 260, replace=False)
    gone = (pl.col("rank") == 2) & pl.col("seq").is_in(lost.astype(np.uint64))
    opened = open_run(SyntheticRun(scenario, run.steps, run.collectives.filter(~gone), run.metadata))

    found = facts(opened)
    assert found.gaps["collectives"].to_list() == [2000, 2000, 1740, 2000]
    assert found.gaps["collectives_missing"].to_list() == [0, 0, 260, 0]
    assert found.incomplete_steps == len({seq // 8 for seq in lost.tolist()})
    # A step can be compared if its own last bucket and that of the step before are there.
    last_lost = {seq // 8 for seq in lost.tolist() if seq % 8 == 7}
    comparable = {step for step in range(1, 250) if step not in last_lost and step - 1 not in last_lost}
    assert set(found.steps.drop_nulls("lateness_ns")["step"]) == comparable

    verdict: Any = stragglers(opened).verdict
    assert (verdict.rank, verdict.cause) == (1, "optimizer")
    assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.02)
    assert verdict.last_share == 1.0
    healthy = replace(scenario, faults=())
    rows = simulate(healthy)
    again = open_run(SyntheticRun(healthy, rows.steps, rows.collectives.filter(~gone), rows.metadata))
    assert stragglers(again).verdict.kind == "none"
