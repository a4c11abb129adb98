"""Change points: found where a level changes, at its step and size, and not where noise only wanders."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis import ChangePoints, change_points, facts, load
from ddpan.analysis.measures._correlation import correlation_times
from ddpan.analysis.measures._level_change import measure_changes
from ddpan.analysis.measures._segmentation import Cut, find_cuts
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log

OpenRun = Callable[..., Run]
MS = 1_000_000
FEW = settings(max_examples=8, deadline=None)


def autoregressive(random: np.random.Generator, rows: int, columns: int, correlation: float, tail: float) -> Any:
    """Noise of first order with innovations of Student's t; the first two hundred rows are thrown away."""
    innovations = random.standard_t(tail, (rows + 200, columns))
    values = np.empty_like(innovations)
    values[0] = innovations[0]
    for row in range(1, len(values)):
        values[row] = correlation * values[row - 1] + innovations[row]
    return values[200:]


class TestCorrelation:
    @pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
    def test_memory_of_autoregressive_noise(self, correlation: float) -> None:
        """Its integrated autocorrelation time is (1 + c) / (1 - c)."""
        values = autoregressive(np.random.default_rng(0), 6000, 8, correlation, 3)
        expected = (1 + correlation) / (1 - correlation)
        found = correlation_times(values, reach=200)
        assert np.median(found) == pytest.approx(expected, rel=0.35)
        assert found.min() > 0.8 * expected

    def test_a_change_of_level_is_no_memory(self) -> None:
        values = np.random.default_rng(0).standard_normal((2000, 1))
        values[1000:] += 5
        centred = values[:, 0] - values.mean()
        usual = centred[:-20] @ centred[20:] / (centred @ centred)
        assert usual > 0.8
        assert correlation_times(values, reach=2000 // 32)[0] < 5

    def test_a_constant_has_none(self) -> None:
        assert correlation_times(np.zeros((100, 2)), reach=10).tolist() == [1, 1]


class TestCuts:
    def test_finds_both_ends_of_a_stretch(self) -> None:
        values = np.random.default_rng(1).standard_normal((1000, 1))
        values[300:450] += 4
        first, last = find_cuts(values, significance=0.003)[0]
        for cut, truth in ((first, 300), (last, 450)):
            assert cut.within[0] < truth < cut.within[1]
            assert abs(cut.at - truth) <= cut.block_rows
        assert max(first.p_value, last.p_value) < 0.003

    def test_without_noise(self) -> None:
        values = np.zeros((200, 2))
        values[120:, 1] = 1
        none, (cut,) = find_cuts(values, significance=0.003)
        assert none == ()
        assert cut.at == pytest.approx(120, abs=4)

    def test_too_few_rows(self) -> None:
        values = np.zeros((63, 1))
        values[30:] = 1
        assert find_cuts(values, significance=0.003) == [()]

    @pytest.mark.parametrize("correlation", [0.0, 0.6, 0.95])
    @pytest.mark.parametrize("rows", [64, 250, 1000])
    def test_healthy_noise_hardly_ever_changes(self, rows: int, correlation: float) -> None:
        """Of runs of 17 series of heavy-tailed noise, at most one in a hundred shows a change."""
        random = np.random.default_rng(rows)
        runs = [autoregressive(random, rows, 17, correlation, 3) for _ in range(60 if rows < 1000 else 20)]
        wrong = sum(any(find_cuts(values, significance=0.003 / 17)) for values in runs)
        assert wrong <= 2

    def test_an_outlier_is_no_change(self) -> None:
        values = np.random.default_rng(2).standard_normal((400, 1))
        values[200:203] += 1000
        assert find_cuts(values, significance=0.003) == [()]


class TestMeasuring:
    def test_place_and_size(self) -> None:
        random = np.random.default_rng(3)
        values = random.standard_normal(1000)
        values[500:] += 3
        (change,) = measure_changes(values, [Cut(506, (400, 600), 16, 1e-9)], rows_per_cut=1, smallest_ns=0.0)
        assert change.at == pytest.approx(500, abs=2)
        assert change.change_low_ns < 3 < change.change_high_ns
        assert change.change_high_ns - change.change_low_ns < 0.6
        assert (change.before_ns, change.after_ns) == pytest.approx((0, 3), abs=0.2)

    def test_the_interval_holds_the_truth_in_95_percent(self) -> None:
        random = np.random.default_rng(4)
        hits = 0
        for _ in range(200):
            values = random.standard_t(3, 400)
            values[250:] += 2
            (change,) = measure_changes(values, [Cut(250, (150, 350), 16, 0.0)], rows_per_cut=1, smallest_ns=0.0)
            hits += change.change_low_ns < 2 < change.change_high_ns
        assert 182 <= hits <= 199

    def test_small_changes_are_dropped_and_their_levels_joined(self) -> None:
        values = np.repeat([0.0, 1.0, 100.0], 100)
        cuts = [Cut(100, (0, 200), 16, 0.0), Cut(200, (100, 300), 16, 0.0)]
        (change,) = measure_changes(values, cuts, rows_per_cut=1, smallest_ns=50.0)
        assert (change.begin, change.at, change.end) == (0, 200, 300)
        assert change.before_ns == 0.5


ONSET = Scenario(ranks=4, steps=300, faults=(Fault(rank=1, cause="forward", delay_ns=10 * MS, first_step=150),))


def rows_of(found: ChangePoints) -> list[tuple[str, int | None, int]]:
    return found.changes.select("series", "rank", "step").rows()


class TestRuns:
    @pytest.mark.parametrize("ranks", [2, 3, 4, 8])
    def test_onset(self, open_run: OpenRun, ranks: int) -> None:
        """Of two ranks, one becoming late looks like the other becoming early; its own time tells them apart."""
        found = change_points(open_run(dataclasses.replace(ONSET, ranks=ranks)))
        assert rows_of(found) == [("step_time", None, 150), ("lateness", 1, 150)]
        assert (found.series, found.reason) == (ranks + 1, None)
        step_time, lateness = found.changes.iter_rows(named=True)
        assert lateness["change_low_ns"] < 10 * MS < lateness["change_high_ns"]
        assert lateness["change_ns"] == pytest.approx(10 * MS, rel=0.03)
        assert step_time["after_ns"] - step_time["before_ns"] == pytest.approx(9 * MS, rel=0.15)
        assert max(step_time["p_value"], lateness["p_value"]) < 0.001

    def test_several_changes_of_several_ranks(self, open_run: OpenRun) -> None:
        faults = (
            Fault(rank=1, cause="forward", delay_ns=20 * MS, first_step=150, end_step=300),
            Fault(rank=2, cause="data", delay_ns=10 * MS, first_step=400),
        )
        found = change_points(open_run(Scenario(ranks=4, steps=600, noise=0.05, faults=faults)))
        assert rows_of(found) == [
            ("step_time", None, 150),
            ("lateness", 1, 150),
            ("step_time", None, 300),
            ("lateness", 1, 300),
            ("step_time", None, 400),
            ("lateness", 2, 400),
        ]
        assert found.changes["change_ns"][3] == pytest.approx(-20 * MS, rel=0.05)

    def test_all_ranks_slow_together_change_the_step_time_alone(self, open_run: OpenRun) -> None:
        faults = tuple(Fault(rank=rank, cause="forward", delay_ns=9 * MS, first_step=120) for rank in range(4))
        found = change_points(open_run(Scenario(ranks=4, steps=300, faults=faults)))
        assert rows_of(found) == [("step_time", None, 120)]
        assert found.changes["change_ns"][0] == pytest.approx(9 * MS, rel=0.05)

    def test_lost_rows(self, open_run: OpenRun) -> None:
        found = change_points(open_run(dataclasses.replace(ONSET, steps=500, lost=dict.fromkeys(range(4), 0.1))))
        late = found.changes.filter(series="lateness")
        assert late["rank"].to_list() == [1]
        assert late["step"][0] == pytest.approx(150, abs=3)

    def test_a_persistent_delay_is_no_change(self, open_run: OpenRun) -> None:
        fault = Fault(rank=1, cause="forward", delay_ns=10 * MS)
        assert change_points(open_run(dataclasses.replace(ONSET, faults=(fault,)))).changes.is_empty()

    def test_changes_below_a_hundredth_of_the_step_are_left_out(self, open_run: OpenRun) -> None:
        fault = dataclasses.replace(ONSET.faults[0], delay_ns=MS // 2)
        assert change_points(open_run(dataclasses.replace(ONSET, noise=0.001, faults=(fault,)))).changes.is_empty()

    @pytest.mark.parametrize("steps", [1, 30, 65])
    def test_too_few_steps(self, open_run: OpenRun, steps: int) -> None:
        found = change_points(open_run(dataclasses.replace(ONSET, steps=steps)))
        assert found.changes.is_empty()
        assert found.series == 0
        assert found.reason is not None
        assert "comparable steps outside warm-up are too few: a change needs 64" in found.reason

    def test_one_rank_has_a_step_time(self, open_run: OpenRun) -> None:
        fault = Fault(rank=0, cause="forward", delay_ns=10 * MS, first_step=150)
        found = change_points(open_run(Scenario(ranks=1, steps=300, faults=(fault,))))
        assert rows_of(found) == [("step_time", None, 150)]

    def test_two_groups(self, open_run: OpenRun) -> None:
        run = simulate(dataclasses.replace(ONSET, ranks=6))
        metadata: Any = {}
        for rank, one in run.metadata.items():
            ranks = [0, 1, 2] if rank < 3 else [3, 4, 5]
            group = {"0": {"name": "0", "ranks": ranks, "backend": "gloo"}}
            metadata[rank] = {**one, "groups": group}
        found = change_points(open_run(dataclasses.replace(run, metadata=metadata)))
        # All ranks leave the simulated buckets together, so the step time of the other group changes too.
        rows = found.changes.select("series", "lowest_rank", "rank").rows()
        assert set(rows) == {("step_time", 0, None), ("lateness", 0, 1), ("step_time", 3, None)}
        assert found.changes["step"].to_list() == pytest.approx([150] * 3, abs=1)


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_healthy_runs(correlation: float) -> None:
    """Twenty runs with heavy-tailed, correlated noise; the rates behind it are in docs/metrics.md."""
    noise: Any = {"noise": 0.1, "noise_correlation": correlation, "noise_tail": 3.0}
    for seed in range(20):
        with tempfile.TemporaryDirectory() as folder:
            run = simulate(Scenario(ranks=4, steps=250, seed=seed, **noise))
            assert change_points(load(write_log(run, folder))).changes.is_empty()


@FEW
@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
def test_permuting_ranks_permutes_the_changes(order: list[int], seed: int) -> None:
    run = simulate(dataclasses.replace(ONSET, noise=0.05, seed=seed))
    names = dict(enumerate(order))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before = change_points(load(write_log(run, first))).changes
        after = change_points(load(write_log(renamed(run, names), second))).changes
    moved = before.with_columns(pl.col("rank").replace_strict(names, return_dtype=pl.UInt32))
    assert_frame_equal(moved.sort("step", "rank"), after.sort("step", "rank"))


def renamed(run: SyntheticRun, names: Mapping[int, int]) -> SyntheticRun:
    rank = pl.col("rank").replace_strict(names, return_dtype=pl.UInt32)
    metadata: Any = {names[old]: {**one, "rank": names[old]} for old, one in run.metadata.items()}
    steps, collectives = (table.with_columns(rank) for table in (run.steps, run.collectives))
    return dataclasses.replace(run, steps=steps, collectives=collectives, metadata=metadata)


def test_large_runs_take_no_time(open_run: OpenRun) -> None:
    """64 ranks and 8,000 steps; processor time, so that busy machines do not count."""
    fault = Fault(rank=9, cause="forward", delay_ns=20 * MS, first_step=1500, end_step=3000)
    run = open_run(Scenario(ranks=64, steps=8000, buckets=1, noise=0.1, faults=(fault,)), steps_per_part=8000)
    facts(run)
    begin = time.process_time()
    found = change_points(run)
    assert time.process_time() - begin < 4
    assert sorted(found.changes.select("series", "rank").rows(), key=str) == [
        ("lateness", 9),
        ("lateness", 9),
        ("step_time", None),
        ("step_time", None),
    ]
    assert found.changes["step"].to_list() == pytest.approx([1500, 1500, 3000, 3000], abs=2)
