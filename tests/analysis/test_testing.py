"""The builder of synthetic runs: that its runs are what it says, and its logs what a recorder writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from ddpan.analysis import load, summarize
from ddpan.analysis.errors import UsageError
from ddpan.analysis.testing import Fault, Scenario, open_run, simulate, write_log
from ddpan.analysis.testing.log import records
from ddpan.collector.schema import columns, read_spool

QUIET = Scenario(ranks=3, steps=6, buckets=4, noise=0.0, transfer_noise=0.0, rebuilt=False)


class TestSimulation:
    def test_quiet_run_is_what_its_phases_say(self) -> None:
        run = simulate(QUIET)
        start = QUIET.start_ns
        ready = QUIET.data_ns + QUIET.other_ns + QUIET.forward_ns
        first = run.steps.row(0, named=True)
        assert first["data_wait_ns"] == QUIET.data_ns
        assert first["forward_start_ns"] == start + QUIET.data_ns + QUIET.other_ns
        assert first["forward_end_ns"] == start + ready
        assert first["compute_end_ns"] == start + ready + QUIET.backward_ns
        # Transfers of 3 ms hide behind buckets of 10 ms each, but for the last.
        assert first["backward_end_ns"] == first["compute_end_ns"] + QUIET.transfer_ns + QUIET.copy_ns
        assert first["optimizer_start_ns"] == first["backward_end_ns"]
        assert first["optimizer_end_ns"] == first["backward_end_ns"] + QUIET.optimizer_ns
        period = run.steps.filter(rank=0)["forward_start_ns"].diff().drop_nulls().unique().to_list()
        whole = ready + QUIET.backward_ns + QUIET.transfer_ns + QUIET.copy_ns + QUIET.optimizer_ns
        assert period == [whole]

    def test_collective_ends_when_the_last_rank_has_launched_it(self) -> None:
        run = simulate(dataclasses.replace(QUIET, noise=0.3, transfer_noise=0.3, transfer_ns=20_000_000))
        by_seq = run.collectives.group_by("seq", maintain_order=True).agg(
            pl.col("end_ns").n_unique().alias("ends"),
            pl.col("end_ns").first(),
            pl.col("launch_ns").max(),
            pl.col("step").first(),
        )
        assert by_seq["ends"].unique().to_list() == [1]
        before = by_seq["end_ns"].shift(1, fill_value=0)
        transfer = by_seq["end_ns"] - pl.select(pl.max_horizontal(by_seq["launch_ns"], before)).to_series()
        assert transfer.to_numpy().min() > 20_000_000 * np.exp(-0.3 * 4)
        assert transfer.to_numpy().max() < 20_000_000 * np.exp(0.3 * 4)

    def test_next_step_begins_after_the_backward(self) -> None:
        run = simulate(dataclasses.replace(QUIET, noise=0.5))
        rows = run.steps.sort("rank", "step")
        following = rows.select(pl.col("forward_start_ns").shift(-1).over("rank") >= pl.col("optimizer_end_ns"))
        assert following.to_series().drop_nulls().all()

    def test_median_of_the_noise(self) -> None:
        run = simulate(dataclasses.replace(QUIET, ranks=8, steps=500, noise=0.5))
        forward = (run.steps["forward_end_ns"] - run.steps["forward_start_ns"]).to_numpy()
        assert np.median(forward) == pytest.approx(QUIET.forward_ns, rel=0.03)
        assert np.log(forward).std() == pytest.approx(0.5, rel=0.05)

    def test_fault_lasts_from_its_first_step_to_its_last(self) -> None:
        fault = Fault(rank=1, cause="forward", delay_ns=7, first_step=2, end_step=5)
        run = simulate(dataclasses.replace(QUIET, faults=(fault,)))
        forward = run.steps.filter(rank=1).select(pl.col("forward_end_ns") - pl.col("forward_start_ns")).to_series()
        assert (forward - QUIET.forward_ns).to_list() == [0, 0, 7, 7, 7, 0]

    def test_noise_is_autoregressive_and_heavy_tailed_as_asked(self) -> None:
        scenario = dataclasses.replace(QUIET, ranks=8, steps=4000, buckets=1, noise=0.05)
        for correlation, tail in ((0.0, 3), (0.7, None), (0.7, 3)):
            run = simulate(dataclasses.replace(scenario, noise_correlation=correlation, noise_tail=tail))
            forward = (run.steps["forward_end_ns"] - run.steps["forward_start_ns"]).to_numpy().reshape(8, -1)
            noise = np.log(forward / QUIET.forward_ns)
            assert noise.std() == pytest.approx(0.05, rel=0.1)
            assert np.corrcoef(noise[:, 1:].ravel(), noise[:, :-1].ravel())[0, 1] == pytest.approx(
                correlation, abs=0.03
            )
            innovations = noise[:, 1:] - correlation * noise[:, :-1]
            # Of a normal distribution 0.27 % lie beyond three standard deviations, of t with three degrees 1.4 %.
            beyond = (np.abs(innovations) > 3 * innovations.std()).mean()
            assert beyond == pytest.approx(0.014 if tail else 0.0027, rel=0.35)

    def test_pace(self) -> None:
        run = simulate(dataclasses.replace(QUIET, pace={2: 1.5}))
        for rank, pace in ((0, 1.0), (2, 1.5)):
            steps = run.steps.filter(rank=rank)
            forward = (steps["forward_end_ns"] - steps["forward_start_ns"]).unique().to_list()
            backward = (steps["compute_end_ns"] - steps["forward_end_ns"]).unique().to_list()
            assert (forward, backward) == ([round(pace * QUIET.forward_ns)], [round(pace * QUIET.backward_ns)])

    def test_fault_in_some_steps_that_varies(self) -> None:
        fault = Fault(rank=1, cause="data", delay_ns=10_000_000, share=0.25, delay_noise=0.2)
        run = simulate(dataclasses.replace(QUIET, steps=4000, faults=(fault,)))
        delay = run.steps.filter(rank=1)["data_wait_ns"].to_numpy() - QUIET.data_ns
        late = delay[delay > 0]
        assert len(late) / 4000 == pytest.approx(0.25, abs=0.03)
        assert (late.mean(), late.std()) == (pytest.approx(10e6, rel=0.02), pytest.approx(2e6, rel=0.1))

    def test_slow_transfer(self) -> None:
        fault = Fault(rank=0, cause="collective", delay_ns=5_000_000, first_step=3)
        run = simulate(dataclasses.replace(QUIET, faults=(fault,)))
        last = run.collectives.filter(bucket=3, rank=1)
        assert (last["end_ns"] - last["launch_ns"]).to_list() == [3_000_000] * 3 + [8_000_000] * 3

    def test_ranks_notice_the_end_of_a_collective_at_different_times(self) -> None:
        run = simulate(dataclasses.replace(QUIET, ranks=8, steps=500, exit_ns=50_000))
        ends = run.collectives["end_ns"].to_numpy().reshape(8, -1)
        # Of eight exponential times with mean m, all less the first, the mean is m (1 - 1/8).
        assert (ends - ends.min(axis=0)).mean() == pytest.approx(50_000 * 7 / 8, rel=0.03)
        following = run.steps.select(pl.col("forward_start_ns").shift(-1).over("rank") >= pl.col("optimizer_end_ns"))
        assert following.to_series().drop_nulls().all()

    def test_first_layout(self) -> None:
        run = simulate(dataclasses.replace(QUIET, rebuilt=True))
        one = run.collectives.filter(rank=0)
        assert one.select("step", "bucket", "layout").rows()[:3] == [(0, 0, 0), (1, 0, 1), (1, 1, 1)]
        assert one["seq"].to_list() == list(range(1 + 5 * 4))
        assert run.steps.row(0, named=True)["compute_end_ns"] == one["launch_ns"][0]

    def test_clocks_of_hosts(self) -> None:
        scenario = dataclasses.replace(QUIET, ranks_per_host=2)
        shifted = dataclasses.replace(scenario, clock_offset_ns={1: 1_000}, clock_drift_ppm={1: 1_000_000.0})
        before, after = (simulate(one).steps["forward_start_ns"].to_numpy() for one in (scenario, shifted))
        moved = after - before
        assert (moved[:12] == 0).all()
        # At a million ppm the clock of the second host runs at twice the speed.
        assert (moved[12:] == 1_000 + before[12:] - QUIET.start_ns).all()

    def test_lost_rows(self) -> None:
        whole = simulate(dataclasses.replace(QUIET, steps=500))
        poor = simulate(dataclasses.replace(QUIET, steps=500, lost={1: 0.3}))
        kept = [poor.collectives.filter(rank=rank).height / 2000 for rank in range(3)]
        assert (kept[0], kept[2]) == (1.0, 1.0)
        assert kept[1] == pytest.approx(0.7, abs=0.04)
        assert_frame_equal(poor.collectives.filter(rank=0), whole.collectives.filter(rank=0))

    def test_same_scenario_same_run(self) -> None:
        one, two = (simulate(Scenario(steps=20, noise=0.1)) for _ in range(2))
        assert_frame_equal(one.collectives, two.collectives)
        other = simulate(Scenario(steps=20, noise=0.1, seed=1))
        assert not one.collectives.equals(other.collectives)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [({"noise_correlation": 1.0}, "less than 1"), ({"noise_tail": 2}, "3 or more")],
    )
    def test_noise_that_makes_no_sense(self, bad: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            dataclasses.replace(QUIET, **bad)

    @pytest.mark.parametrize("bad", [{"ranks": 0}, {"steps": 0}, {"micro_batches": 0}])
    def test_scenarios_that_make_no_sense(self, bad: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="1 or more"):
            dataclasses.replace(QUIET, **bad)

    def test_faults_that_make_no_sense(self) -> None:
        with pytest.raises(UsageError, match="rank 9"):
            Scenario(faults=(Fault(rank=9, cause="data", delay_ns=1),))
        with pytest.raises(UsageError, match="cause must be one of"):
            Fault(rank=0, cause="sunspots", delay_ns=1)
        with pytest.raises(UsageError, match="share must be between 0 and 1"):
            Fault(rank=0, cause="data", delay_ns=1, share=1.5)


class TestOpenRun:
    def test_results_are_those_of_the_log(self, tmp_path: Path) -> None:
        slow = Fault(rank=2, cause="data", delay_ns=20_000_000)
        run = simulate(Scenario(steps=80, faults=(slow,), lost={1: 0.1}))
        at_once, from_log = summarize(open_run(run)), summarize(load(write_log(run, tmp_path, steps_per_part=30)))
        assert at_once.stragglers.verdict == from_log.stragglers.verdict
        for name in ("ranks", "buckets"):
            assert_frame_equal(getattr(at_once.stragglers, name), getattr(from_log.stragglers, name))
        for name in ("step_split", "modules", "gaps"):
            assert_frame_equal(getattr(at_once, name), getattr(from_log, name))
        assert at_once.statistics.overall.equals(from_log.statistics.overall)

    def test_options_and_progress(self) -> None:
        run = open_run(simulate(Scenario(steps=30)), skip_warmup=10)
        shares: list[float] = []
        assert summarize(run, progress=shares.append).modules["warmup_steps"].to_list() == [10]
        assert shares == [1.0]
        assert (run.info.steps, run.world_size, run.ranks) == (30, 4, (0, 1, 2, 3))


class TestLog:
    def test_rows_of_no_step_come_with_the_step_they_were_launched_in(self, tmp_path: Path) -> None:
        run = simulate(QUIET)
        step = pl.when(pl.col("bucket") != 1).then("step")
        folder = write_log(
            dataclasses.replace(run, collectives=run.collectives.with_columns(step=step)), tmp_path, steps_per_part=2
        )
        for part in range(3):
            rows = pl.read_parquet(folder / "rank-00001" / f"collectives-{part:06d}.parquet")
            assert rows["seq"].sort().to_list() == list(range(8 * part, 8 * part + 8))
            assert rows["step"].null_count() == 2

    def test_chosen_steps_leave_rows_of_no_step_alone(self, tmp_path: Path) -> None:
        run = simulate(QUIET)
        step = pl.when(pl.col("bucket") != 1).then("step")
        folder = write_log(dataclasses.replace(run, collectives=run.collectives.with_columns(step=step)), tmp_path)
        chosen = load(folder, steps=(2, 4))
        for rows in (chosen.collectives().collect(), pl.concat(block.collectives for block in chosen.blocks())):
            assert sorted(rows["step"].unique(), key=lambda one: -1 if one is None else one) == [None, 2, 3]
            assert rows["step"].null_count() == 3 * 6
        assert set(chosen.steps().collect()["step"]) == {2, 3}

    def test_spool_holds_the_rows(self, tmp_path: Path) -> None:
        run = simulate(dataclasses.replace(QUIET, micro_batches=2))
        folder = write_log(run, tmp_path, spool=True)
        spool = read_spool(folder / "rank-00001" / "live-000000.spool")
        assert (spool.run, spool.rank, spool.world_size, spool.segment) == (QUIET.run, 1, 3, 0)
        mine = run.steps.filter(rank=1)
        values, missing = spool.columns("steps")["compute_end_ns"]
        assert missing is not None
        assert missing.tolist() == mine["compute_end_ns"].is_null().to_list() == [True, False] * 6
        assert values[~missing].tolist() == mine["compute_end_ns"].drop_nulls().to_list()

    @pytest.mark.parametrize("table", ["steps", "collectives"])
    def test_records_and_rows_are_the_same(self, table: str) -> None:
        rows = getattr(simulate(dataclasses.replace(QUIET, micro_batches=2)), table).filter(rank=2)
        for name, (values, missing) in columns(table, records(table, rows), rank=2, epoch_offset_ns=0).items():
            expected = rows[name].to_physical()
            assert (
                np.zeros(len(values), bool) if missing is None else missing
            ).tolist() == expected.is_null().to_list()
            known = ~expected.is_null().to_numpy()
            assert values[known].tolist() == expected.drop_nulls().to_list()
