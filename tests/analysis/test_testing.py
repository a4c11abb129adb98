"""The builder of synthetic runs: that its runs are what it says, and its logs what a recorder writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from ddpan.analysis.errors import UsageError
from ddpan.analysis.testing import Fault, Scenario, simulate, write_log
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

    @pytest.mark.parametrize("bad", [{"ranks": 0}, {"steps": 0}, {"micro_batches": 0}])
    def test_scenarios_that_make_no_sense(self, bad: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="1 or more"):
            dataclasses.replace(QUIET, **bad)

    def test_faults_that_make_no_sense(self) -> None:
        with pytest.raises(UsageError, match="rank 9"):
            Scenario(faults=(Fault(rank=9, cause="data", delay_ns=1),))
        with pytest.raises(UsageError, match="cause must be one of"):
            Fault(rank=0, cause="sunspots", delay_ns=1)


class TestLog:
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
