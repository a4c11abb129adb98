"""The verdict on whole runs, from the log on; the answer is known because the run was made with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis.measures.stragglers import Stragglers, stragglers
from ddpan.analysis.run import Run
from ddpan.analysis.testing import CAUSES, Fault, Scenario, SyntheticRun, simulate
from ddpan.analysis.testing import open_run as in_memory

OpenRun = Callable[..., Run]
MS = 1_000_000
# A step takes about 70 ms without a fault.
HEALTHY = Scenario(ranks=4, steps=120, buckets=8, noise=0.05, seed=11)


def faulty(*faults: Fault, scenario: Scenario = HEALTHY) -> Scenario:
    return replace(scenario, faults=faults)


def delayed(rank: int, cause: str = "backward", delay_ms: float = 20, **more: Any) -> Fault:
    return Fault(rank=rank, cause=cause, delay_ns=round(delay_ms * MS), **more)


def judge(run: Run) -> Any:
    """The verdict; not typed, since what may be None in it is known here."""
    return stragglers(run).verdict


class TestNamed:
    @pytest.mark.parametrize("ranks", [2, 3, 4, 9])
    @pytest.mark.parametrize("cause", CAUSES)
    def test_rank_and_cause(self, open_run: OpenRun, cause: str, ranks: int) -> None:
        verdict = judge(open_run(faulty(delayed(1, cause), scenario=replace(HEALTHY, ranks=ranks))))
        assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 1, cause)
        assert verdict.delay_low_ns < 20 * MS < verdict.delay_high_ns
        assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.05)
        assert verdict.last_share > 0.98
        assert verdict.p_value < 1e-6
        assert (verdict.steps, verdict.affected_steps) == (118, 118)
        assert (verdict.first_step, verdict.last_step) == (2, 119)

    @pytest.mark.parametrize("bucket", [0, 1, 4, 7])
    def test_first_late_bucket(self, open_run: OpenRun, bucket: int) -> None:
        verdict = judge(open_run(faulty(delayed(3, bucket=bucket))))
        assert (verdict.cause, verdict.first_late_bucket) == ("backward", bucket)

    def test_first_late_bucket_of_a_rank_already_late_before(self, open_run: OpenRun) -> None:
        found = judge(open_run(faulty(delayed(3, "forward", 12), delayed(3, bucket=5))))
        assert (found.cause, found.first_late_bucket) == ("backward", 5)
        assert found.delay_ns == pytest.approx(32 * MS, rel=0.05)

    def test_parameters_of_the_first_late_bucket(self, open_run: OpenRun) -> None:
        run = simulate(faulty(delayed(2, bucket=3)))
        for metadata in run.metadata.values():
            for number, bucket in enumerate(metadata["layouts"]["0"]["1"]):
                bucket["parameters"] = [f"layer{number}.weight", f"layer{number}.bias"]
        verdict = judge(open_run(run))
        assert verdict.first_late_parameters == ("layer3.weight", "layer3.bias")

    def test_the_cost_is_what_the_run_without_the_fault_takes_less(self, open_run: OpenRun) -> None:
        # The same scenario without the fault draws the same noise.
        with_fault = judge(open_run(faulty(delayed(0, "data"))))
        healthy = simulate(HEALTHY).collectives.filter((pl.col("rank") == 0) & (pl.col("bucket") == 7))
        ends = healthy.sort("step")["end_ns"].to_list()
        expected = (ends[-1] - ends[0]) / (len(ends) - 1)
        assert with_fault.step_time_without_ns == pytest.approx(expected, rel=0.01)
        assert with_fault.lost_seconds == pytest.approx((with_fault.step_time_ns - expected) * 118 / 1e9, rel=0.03)
        assert with_fault.lost_gpu_hours == pytest.approx(with_fault.lost_seconds * 4 / 3600)

    def test_two_slow_ranks_are_both_named_the_costlier_first(self, open_run: OpenRun) -> None:
        scenario = replace(HEALTHY, ranks=6)
        found = stragglers(open_run(faulty(delayed(4, "data", 15), delayed(2, "optimizer", 30), scenario=scenario)))
        assert [(one.rank, one.cause) for one in found.named] == [(2, "optimizer"), (4, "data")]
        assert found.verdict == found.named[0]

    @pytest.mark.parametrize(
        ("first", "end", "kind"), [(60, None, "onset"), (40, 80, "transient"), (0, 40, "transient")]
    )
    def test_when(self, open_run: OpenRun, first: int, end: int | None, kind: str) -> None:
        verdict = judge(open_run(faulty(delayed(1, "forward", first_step=first, end_step=end))))
        assert (verdict.kind, verdict.rank, verdict.cause) == (kind, 1, "forward")
        assert verdict.first_step == pytest.approx(max(first, 2), abs=1)
        assert verdict.last_step == pytest.approx((end or 120) - 1, abs=1)
        assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.06)

    def test_reason_reads_well(self, open_run: OpenRun) -> None:
        reason = judge(open_run(faulty(delayed(1, bucket=4), scenario=replace(HEALTHY, noise=0.0)))).reason
        assert reason == (
            "Rank 1 is late in nearly every step, in its backward from bucket 4 on: by 20.0 ms a step against the "
            "other ranks (95% interval 20.0 ms to 20.0 ms), and the last to arrive in 100% of 118 steps."
        )


class TestNobody:
    @pytest.mark.parametrize("seed", range(4))
    def test_a_healthy_run(self, open_run: OpenRun, seed: int) -> None:
        found = stragglers(open_run(replace(HEALTHY, noise=0.2, seed=seed)))
        assert (found.verdict.kind, found.verdict.rank, found.named) == ("none", None, ())
        assert found.verdict.steps == 118
        assert found.verdict.reason.startswith("No rank stands out in 118 steps")

    def test_a_delay_of_half_a_percent(self, open_run: OpenRun) -> None:
        assert stragglers(open_run(faulty(delayed(1, delay_ms=0.3), scenario=replace(HEALTHY, noise=0.01)))).named == ()

    def test_each_rank_in_turn(self, open_run: OpenRun) -> None:
        turns = [delayed(step % 4, "data", 40, first_step=step, end_step=step + 1) for step in range(120)]
        verdict = judge(open_run(faulty(*turns)))
        assert (verdict.kind, verdict.rank) == ("rotating", None)
        assert "each time another" in verdict.reason

    def test_one_rank(self, open_run: OpenRun) -> None:
        found = stragglers(open_run(replace(HEALTHY, ranks=1)))
        assert found.verdict.kind == "insufficient_data"
        assert found.verdict.reason == "Only one rank takes part: there is no other to compare it with."
        assert found.ranks["rank"].to_list() == [0]

    def test_too_few_steps_say_how_many_are_missing(self, open_run: OpenRun) -> None:
        verdict = judge(open_run(faulty(delayed(1, delay_ms=60), scenario=replace(HEALTHY, steps=15))))
        assert (verdict.kind, verdict.rank) == ("insufficient_data", None)
        assert verdict.reason == (
            "Only 13 steps can be compared after warm-up, and at least 20 are needed. Next: record 7 more."
        )

    def test_nothing_but_warmup(self, open_run: OpenRun) -> None:
        found = stragglers(open_run(HEALTHY, skip_warmup=1000))
        assert found.verdict.kind == "insufficient_data"

    def test_two_ranks_need_more_steps_than_four(self, open_run: OpenRun) -> None:
        # Ten blocks of three steps: a fair coin falls ten times on one side in one of 500 runs for one of two ranks.
        verdict = judge(open_run(replace(HEALTHY, ranks=2, steps=24)))
        assert verdict.kind == "insufficient_data"
        assert "record at least" in verdict.reason


class TestTables:
    @pytest.fixture
    def found(self, open_run: OpenRun) -> Stragglers:
        return stragglers(open_run(faulty(delayed(2, "data"), scenario=replace(HEALTHY, ranks_per_host=2))))

    def test_ranks_are_sorted_by_lateness(self, found: Stragglers) -> None:
        assert found.ranks["rank"][0] == 2
        assert found.ranks["lateness_ns"].is_sorted(descending=True)
        assert found.ranks.sort("rank")["host"].to_list() == ["host-000", "host-000", "host-001", "host-001"]
        assert found.ranks["last_share"].sum() == pytest.approx(1)
        assert found.ranks["left_out"].null_count() == 4

    def test_the_slow_rank_waits_for_nobody_and_the_others_for_it(self, found: Stragglers) -> None:
        waits = dict(found.ranks.select("rank", "wait_ns").iter_rows())
        assert waits[2] < 1 * MS
        assert [waits[rank] for rank in (0, 1, 3)] == pytest.approx([20 * MS] * 3, rel=0.05)

    def test_excess_of_phases(self, found: Stragglers) -> None:
        row = found.ranks.row(0, named=True)
        assert row["data_ns"] == pytest.approx(20 * MS, rel=0.02)
        for phase in ("forward", "backward", "optimizer", "other"):
            assert abs(row[f"{phase}_ns"]) < 1 * MS

    def test_the_named_rank_s_delay_is_the_verdict_s(self, found: Stragglers) -> None:
        row = found.ranks.row(0, named=True)
        assert (row["delay_ns"], row["delay_low_ns"]) == (found.verdict.delay_ns, found.verdict.delay_low_ns)
        assert (row["last_share"], row["p_value"]) == (found.verdict.last_share, found.verdict.p_value)

    def test_buckets_show_the_named_rank(self, found: Stragglers) -> None:
        assert found.buckets["bucket"].to_list() == list(range(8))
        assert set(found.buckets["rank"]) == {2}
        assert found.buckets["lateness_ns"].min() == pytest.approx(20 * MS, rel=0.05)
        assert found.buckets["transfer_ns"].to_list() == pytest.approx([3 * MS] * 8, rel=0.15)
        assert set(found.buckets["n"]) == {118}

    def test_no_value_is_nan(self, found: Stragglers) -> None:
        for table in (found.ranks, found.buckets):
            floats = table.select(pl.col(pl.Float64).is_nan().any())
            assert not any(floats.row(0))


class TestInvariance:
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(order=st.permutations(range(4)), cause=st.sampled_from(CAUSES))
    def test_permuting_ranks_permutes_the_answer(self, open_run: OpenRun, order: list[int], cause: str) -> None:
        run = simulate(faulty(delayed(1, cause)))
        found, moved = stragglers(open_run(run)), stragglers(open_run(permuted(run, order)))
        assert moved.verdict.rank == order[1]
        assert replace(moved.verdict, rank=1, ranks=(1,), reason="") == replace(found.verdict, reason="")
        places = pl.DataFrame({"rank": range(4), "to": order}, schema_overrides={"rank": pl.UInt32})
        expected = found.ranks.join(places, on="rank").with_columns(rank=pl.col("to").cast(pl.UInt32)).drop("to")
        assert moved.ranks.sort("rank").equals(expected.sort("rank"))

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(hours=st.lists(st.integers(-5, 5), min_size=4, max_size=4))
    def test_shifted_clocks_change_nothing(self, open_run: OpenRun, hours: list[int]) -> None:
        scenario = faulty(delayed(1), scenario=replace(HEALTHY, ranks_per_host=1))
        offsets = {host: hour * 3_600_000_000_000 for host, hour in enumerate(hours)}
        found = stragglers(open_run(scenario))
        moved = stragglers(open_run(replace(scenario, clock_offset_ns=offsets)))
        assert moved.verdict == found.verdict
        assert moved.ranks.equals(found.ranks)

    @settings(max_examples=8, deadline=None)
    @given(drifts=st.lists(st.floats(-100, 100), min_size=4, max_size=4), cause=st.sampled_from(CAUSES))
    def test_drifting_clocks_change_no_number_by_more_than_they_drift(self, drifts: list[float], cause: str) -> None:
        """A duration is measured in the units of its own clock, so 100 ppm change one of 100 ms by 10 us at most."""
        scenario = faulty(delayed(1, cause), scenario=replace(HEALTHY, ranks_per_host=1))
        found, moved = (
            stragglers(in_memory(simulate(replace(scenario, clock_drift_ppm=drift))))
            for drift in ({}, dict(enumerate(drifts)))
        )
        one, other = found.verdict, moved.verdict
        assert (one.kind, one.rank, one.cause) == (other.kind, other.rank, other.cause) == ("persistent", 1, cause)
        assert (one.affected_steps, one.last_share) == (other.affected_steps, other.last_share)
        times = ("delay_ns", "lateness_ns", "wait_ns", *(f"{phase}_ns" for phase in CAUSES))
        before, after = (result.ranks.sort("rank").select(times) for result in (found, moved))
        assert_frame_equal(before, after, rel_tol=0, abs_tol=2 * 100e-6 * 100 * MS)


class TestGroups:
    def test_ranks_are_compared_within_their_group_alone(self, open_run: OpenRun) -> None:
        # Two pipeline stages under one module number; the second takes longer in its forward, which is no fault.
        run = in_two_groups(simulate(replace(HEALTHY, ranks=6, noise=0.02)), first=(0, 1, 2), slower_ms=20)
        found = stragglers(open_run(run))
        assert found.named == ()

    def test_a_slow_rank_of_one_group(self, open_run: OpenRun) -> None:
        scenario = faulty(delayed(4, "data"), scenario=replace(HEALTHY, ranks=6, noise=0.02))
        verdict = judge(open_run(in_two_groups(simulate(scenario), first=(0, 1, 2), slower_ms=0)))
        assert (verdict.rank, verdict.cause) == (4, "data")
        assert verdict.lost_gpu_hours == pytest.approx(verdict.lost_seconds * 3 / 3600)


def permuted(run: SyntheticRun, order: list[int]) -> SyntheticRun:
    """The same run with rank r called ``order[r]``."""
    names = dict(enumerate(order))
    steps, collectives = (
        table.with_columns(pl.col("rank").replace_strict(names, return_dtype=pl.UInt32)).sort(
            "rank", maintain_order=True
        )
        for table in (run.steps, run.collectives)
    )
    metadata = {order[rank]: {**one, "rank": order[rank]} for rank, one in run.metadata.items()}
    return SyntheticRun(run.scenario, steps, collectives, metadata)  # type: ignore[arg-type]


def in_two_groups(run: SyntheticRun, *, first: tuple[int, ...], slower_ms: int) -> SyntheticRun:
    """Split the ranks into two process groups, and let all of the second begin later by a constant each step."""
    second = tuple(rank for rank in run.metadata if rank not in first)
    late = pl.when(pl.col("rank").is_in(second)).then((pl.col("step").cast(pl.Int64) + 1) * slower_ms * MS).otherwise(0)
    group = pl.when(pl.col("rank").is_in(second)).then(pl.lit(1)).otherwise(pl.lit(0)).cast(pl.UInt16)
    for rank, metadata in run.metadata.items():
        members = {"0": first, "1": second}
        metadata["groups"] = {
            number: {"name": number, "ranks": list(ranks), "backend": "gloo"} for number, ranks in members.items()
        }
        metadata["modules"]["0"]["group"] = int(rank in second)
    times = pl.selectors.matches("_(start|end)_ns$|^(ready|launch|end)_ns$")
    return SyntheticRun(
        run.scenario,
        run.steps.with_columns(times + late),
        run.collectives.with_columns(times + late, group=group),
        run.metadata,
    )
