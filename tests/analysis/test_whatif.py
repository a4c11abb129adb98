"""What-if: the arithmetic by hand, and runs in which the truth is the same run without the fault."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis import UsageError, WhatIf, facts, load, stragglers, whatif
from ddpan.analysis.measures._counterfactual import Counterfactual
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log

OpenRun = Callable[..., Run]
MS = 1_000_000
FEW = settings(max_examples=10, deadline=None)
SLOW = Scenario(ranks=4, steps=100, noise=0.01, faults=(Fault(rank=1, cause="forward", delay_ns=10 * MS),))


def of(result: WhatIf, scenario: str) -> dict[str, Any]:
    return result.scenarios.filter(scenario=scenario).row(0, named=True)


class TestArithmetic:
    """Three steps of three ranks, ten units of transfer after the last arrival."""

    arrival = np.array([[1.0, 2.0, 9.0], [5.0, 4.0, 6.0], [8.0, 7.0, 1.0]])
    replay = Counterfactual(arrival, arrival.max(axis=1) + 10)

    def test_as_recorded(self) -> None:
        assert self.replay.mean_ns() == pytest.approx((19 + 16 + 18) / 3)
        assert self.replay.mean_with_ns([]) == pytest.approx(self.replay.mean_ns())

    def test_all_at_the_median(self) -> None:
        assert self.replay.mean_with_ns([0, 1, 2]) == pytest.approx((12 + 15 + 17) / 3)

    def test_one_at_the_median(self) -> None:
        # Rank 2 is last in steps 0 and 1; without it they end with ranks 1 and 0. Rank 0 is last in step 2.
        assert self.replay.mean_with_ns([2]) == pytest.approx((12 + 15 + 18) / 3)
        assert self.replay.saved_ns().tolist() == pytest.approx([1 / 3, 0, 8 / 3])

    def test_putting_one_right_after_the_other(self) -> None:
        assert self.replay.costliest(3) == [2, 0]
        assert self.replay.saved_ns([2]).tolist() == pytest.approx([1 / 3, 0, 0])

    def test_of_two_ranks_the_earlier_one_is_typical(self) -> None:
        two = Counterfactual(np.array([[1.0, 4.0]]), np.array([10.0]))
        assert two.mean_with_ns([1]) == two.mean_with_ns([0, 1]) == 7
        assert two.mean_with_ns([0]) == 10

    def test_unknown_arrivals_are_nobodys_fault(self) -> None:
        some = Counterfactual(np.array([[1.0, np.nan, 5.0], [np.nan, 2.0, 3.0]]), np.array([10.0, 10.0]))
        assert some.saved_ns().tolist() == pytest.approx([0, 0, (5 - 3 + 3 - 2.5) / 2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=20), st.integers(0, 3))
def test_quick_sums_equal_slow_ones(rows: list[list[int]], rank: int) -> None:
    arrival = np.array(rows, np.float64)
    replay = Counterfactual(arrival, arrival.max(axis=1) + 5)
    typical = np.median(arrival, axis=1)
    one = arrival.copy()
    one[:, rank] = np.minimum(one[:, rank], typical)
    expected = (one.max(axis=1) + 5).mean()
    assert replay.mean_with_ns([rank]) == pytest.approx(expected)
    assert replay.mean_ns() - replay.saved_ns()[rank] == pytest.approx(expected)
    assert replay.mean_with_ns(range(4)) == pytest.approx((typical + 5).mean())


class TestRuns:
    @pytest.mark.parametrize("ranks", [2, 4, 9])
    def test_the_run_without_the_fault_is_what_is_predicted(self, open_run: OpenRun, ranks: int) -> None:
        scenario = dataclasses.replace(SLOW, ranks=ranks)
        result = whatif(open_run(scenario))
        healthy = simulate(dataclasses.replace(scenario, faults=(), run="20260102T030405-00c0ffee"))
        truth = facts(open_run(healthy)).steps.filter(~pl.col("warmup"))["step_time_ns"].mean()
        assert isinstance(truth, float)
        first = result.ranks.row(0, named=True)
        assert first["rank"] == 1
        assert first["step_time_ns"] == pytest.approx(truth, rel=0.01)
        recorded = of(result, "recorded")
        assert first["slowdown"] == pytest.approx(recorded["step_time_ns"] / first["step_time_ns"])
        assert first["waste"] == pytest.approx(1 - 1 / first["slowdown"])
        assert first["saved_seconds"] == pytest.approx((recorded["step_time_ns"] - first["step_time_ns"]) * 98 / 1e9)
        assert first["saved_gpu_hours"] == pytest.approx(first["saved_seconds"] * ranks / 3600)
        assert first["explained"] > 0.9
        assert (recorded["slowdown"], recorded["waste"], recorded["steps"], result.reason) == (1, 0, 98, None)

    def test_agrees_with_the_verdict(self, open_run: OpenRun) -> None:
        run = open_run(SLOW)
        verdict = stragglers(run).verdict
        first = whatif(run).ranks.row(0, named=True)
        assert first["rank"] == verdict.rank
        assert first["step_time_ns"] == pytest.approx(verdict.step_time_without_ns)
        assert first["saved_gpu_hours"] == pytest.approx(verdict.lost_gpu_hours)

    def test_two_slow_ranks_cost_little_each_and_much_together(self, open_run: OpenRun) -> None:
        faults = tuple(Fault(rank=rank, cause="data", delay_ns=10 * MS) for rank in (0, 3))
        result = whatif(open_run(dataclasses.replace(SLOW, ranks=6, faults=faults)), top=4)
        assert result.ranks["waste"].max() < 0.02  # type: ignore[operator]
        pair = result.top.filter(fixed=2).row(0, named=True)
        assert sorted(pair["ranks"]) == [0, 3]
        assert pair["waste"] == pytest.approx(10 / 79, rel=0.1)
        assert pair["explained"] > 0.9
        assert result.top["explained"].is_sorted()
        assert of(result, "no_rank_late")["waste"] >= pair["waste"]

    def test_hidden_communication(self, open_run: OpenRun) -> None:
        """Without noise, the last bucket's transfer of 3 ms is all that is exposed."""
        result = whatif(open_run(Scenario(ranks=3, steps=40, noise=0.0, transfer_noise=0.0)))
        recorded, hidden = of(result, "recorded"), of(result, "communication_hidden")
        assert recorded["step_time_ns"] - hidden["step_time_ns"] == pytest.approx(3 * MS)
        assert of(result, "no_rank_late")["waste"] == 0
        assert result.ranks["explained"].to_list() == [None] * 3
        assert result.top.is_empty()

    def test_waiting_is_not_communication_to_hide(self, open_run: OpenRun) -> None:
        """Three ranks wait 10 ms with their last bucket in flight; that stays if communication is hidden."""
        result = whatif(open_run(dataclasses.replace(SLOW, noise=0.0, transfer_noise=0.0)))
        saved = of(result, "recorded")["step_time_ns"] - of(result, "communication_hidden")["step_time_ns"]
        assert saved == pytest.approx(3 * MS)

    def test_lost_rows_change_little(self, open_run: OpenRun) -> None:
        whole = whatif(open_run(dataclasses.replace(SLOW, steps=400)))
        poor = simulate(dataclasses.replace(SLOW, steps=400, lost={1: 0.3}, run="20260102T030405-00c0ffee"))
        result = whatif(open_run(poor))
        assert result.ranks["rank"][0] == 1
        assert result.ranks["slowdown"][0] == pytest.approx(whole.ranks["slowdown"][0], rel=0.01)
        for scenario in ("no_rank_late", "communication_hidden"):
            assert of(result, scenario)["slowdown"] == pytest.approx(of(whole, scenario)["slowdown"], rel=0.01)
        assert result.reason is None

    def test_where_no_step_is_complete_it_says_so(self, open_run: OpenRun) -> None:
        result = whatif(open_run(dataclasses.replace(SLOW, ranks=16, lost=dict.fromkeys(range(16), 0.05))))
        assert result.reason == "in most steps some rank is unknown; it may be the late one, so savings may be larger"
        assert result.ranks["rank"][0] == 1

    def test_a_missing_rank_is_named(self, open_run: OpenRun) -> None:
        run = simulate(SLOW)
        kept = pl.col("rank") != 3
        metadata = {rank: one for rank, one in run.metadata.items() if rank != 3}
        tables = (run.steps.filter(kept), run.collectives.filter(kept))
        result = whatif(open_run(SyntheticRun(run.scenario, *tables, metadata)))
        assert result.reason == "ranks 3 cannot be compared; what they cost is not in these numbers"
        assert result.scenarios["saved_gpu_hours"][1] == pytest.approx(result.scenarios["saved_seconds"][1] * 4 / 3600)

    @pytest.mark.parametrize("scenario", [Scenario(ranks=1, steps=50), Scenario(ranks=4, steps=1)])
    def test_nothing_to_compare(self, open_run: OpenRun, scenario: Scenario) -> None:
        result = whatif(open_run(scenario))
        assert [table.height for table in (result.scenarios, result.ranks, result.top)] == [0, 0, 0]
        assert result.reason is not None

    @pytest.mark.parametrize("top", [0, -1])
    def test_top_must_be_positive(self, open_run: OpenRun, top: int) -> None:
        with pytest.raises(UsageError, match="top must be 1 or more"):
            whatif(open_run(SLOW), top=top)


@FEW
@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
def test_permuting_ranks_permutes_the_answer(order: list[int], seed: int) -> None:
    run = simulate(dataclasses.replace(SLOW, noise=0.1, steps=40, seed=seed))
    names = dict(enumerate(order))
    rank = pl.col("rank").replace_strict(names, return_dtype=pl.UInt32)
    metadata: Any = {names[old]: {**one, "rank": names[old]} for old, one in run.metadata.items()}
    tables = (run.steps.with_columns(rank), run.collectives.with_columns(rank))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before = whatif(load(write_log(run, first)))
        after = whatif(load(write_log(SyntheticRun(run.scenario, *tables, metadata), second)))
    assert_frame_equal(before.scenarios, after.scenarios)
    assert_frame_equal(before.ranks.with_columns(rank).sort("rank"), after.ranks.sort("rank"))
    assert [[names[one] for one in ranks] for ranks in before.top["ranks"].to_list()] == after.top["ranks"].to_list()
