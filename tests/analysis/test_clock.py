"""Clock alignment: offsets and drifts that are known because the test, or the machine, made them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis import ClockOffsets, UsageError, change_points, clock_offsets, load, stragglers, whatif
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log

OpenRun = Callable[..., Run]
FIXTURES = Path(__file__).parents[2] / "fixtures"
US, MS, HOUR_NS = 1_000, 1_000_000, 3_600_000_000_000
FEW = settings(max_examples=8, deadline=None)

APART = Scenario(
    ranks=6,
    ranks_per_host=2,
    steps=120,
    exit_ns=50 * US,
    clock_offset_ns={0: 7 * HOUR_NS, 1: -5 * HOUR_NS, 2: 1234},
    clock_drift_ppm={0: 20.0, 1: 100.0, 2: -60.0},
)


def true_offset_ns(scenario: Scenario, host: int, at_ns: int) -> float:
    """Reading of a host's clock less that of host 0 when that reads ``at_ns``."""
    (ahead, own_ahead), (drift, own_drift) = (
        [by_host.get(one, 0) for one in (0, host)] for by_host in (scenario.clock_offset_ns, scenario.clock_drift_ppm)
    )
    passed = (at_ns - scenario.start_ns - ahead) / (1 + drift * 1e-6)
    return own_ahead - ahead + passed * (own_drift - drift) * 1e-6


def true_drift_ppm(scenario: Scenario, host: int) -> float:
    own, reference = (1 + scenario.clock_drift_ppm.get(one, 0.0) * 1e-6 for one in (host, 0))
    return (own / reference - 1) * 1e6


def assert_found(scenario: Scenario, found: ClockOffsets) -> None:
    """Every host's offset and drift are known to within the error bar."""
    assert found.hosts["reason"].null_count() == found.hosts.height
    for row in found.hosts.iter_rows(named=True):
        host = int(row["host"].removeprefix("host-"))
        assert abs(row["offset_ns"] - true_offset_ns(scenario, host, found.at_ns)) <= row["error_ns"] + 1
        assert abs(row["drift_ppm"] - true_drift_ppm(scenario, host)) <= row["drift_error_ppm"] + 1e-6


def offsets_of(run: SyntheticRun, **options: Any) -> ClockOffsets:
    with tempfile.TemporaryDirectory() as folder:
        return clock_offsets(load(write_log(run, folder), **options))


def moved(run: SyntheticRun, change: Callable[[pl.Expr], pl.Expr]) -> SyntheticRun:
    """``run`` with every moment changed; durations stay."""

    def change_all(frame: pl.DataFrame) -> pl.DataFrame:
        names = [name for name in frame.columns if name.endswith("_ns") and name != "data_wait_ns"]
        return frame.with_columns(change(pl.col(names)).cast(pl.Int64))

    return dataclasses.replace(run, steps=change_all(run.steps), collectives=change_all(run.collectives))


def regrouped(run: SyntheticRun, groups: Mapping[int, Sequence[int]], bridges: pl.DataFrame | None) -> SyntheticRun:
    """``run`` with the ranks reducing their gradients in several groups, and other collectives in group 9."""
    group_of = {rank: number for number, ranks in groups.items() for rank in ranks}
    bridge = sorted(set(bridges["rank"].to_list())) if bridges is not None else []
    metadata: Any = {}
    for rank, one in run.metadata.items():
        named = {str(group_of[rank]): list(groups[group_of[rank]])} | ({"9": bridge} if rank in bridge else {})
        module = {**one["modules"]["0"], "group": group_of[rank]}
        described = {number: {"name": number, "ranks": ranks, "backend": "gloo"} for number, ranks in named.items()}
        metadata[rank] = {**one, "groups": described, "modules": {"0": module}}
    own = run.collectives.with_columns(group=pl.col("rank").replace_strict(group_of, return_dtype=pl.UInt16))
    collectives = own if bridges is None else pl.concat([own, bridges], how="diagonal")
    return dataclasses.replace(run, collectives=collectives, metadata=metadata)


def bridging(run: SyntheticRun, ranks: Sequence[int], op: str) -> pl.DataFrame:
    """A collective of ``ranks`` beside each step's last bucket."""
    last = run.collectives.filter(pl.col("rank").is_in(ranks) & (pl.col("bucket") == pl.col("bucket").max()))
    kind = pl.lit(op, run.collectives.schema["op"])
    return last.select("rank", "bytes", "launch_ns", "end_ns", group=pl.lit(9, pl.UInt16), seq="seq", op=kind)


class TestAlignment:
    def test_offsets_and_drifts_of_hosts(self, open_run: OpenRun) -> None:
        found = clock_offsets(open_run(APART))
        assert_found(APART, found)
        assert (found.reference_rank, found.reference_host, found.reason) == (0, "host-000", None)
        assert found.hosts.row(0)[2:6] == (0, 0.0, 0.0, 0.0)
        assert found.hosts["offset_ns"][1] == pytest.approx(-12 * HOUR_NS, abs=1 * MS)
        # Half of each rank's delays are above 35 µs; nothing better than that can be promised, nor ten times worse.
        assert found.hosts["error_ns"][1:].to_list() == pytest.approx([150 * US, 150 * US], rel=0.5)

    def test_moments_come_onto_the_reference_exactly(self, open_run: OpenRun) -> None:
        scenario = dataclasses.replace(APART, exit_ns=0)
        run = open_run(scenario)
        found = clock_offsets(run)
        ends = run.collectives().filter(pl.col("step") > 0).sort("seq").collect().partition_by("rank", as_dict=True)
        aligned = np.stack(
            [found.onto_reference(int(rank), rows["end_ns"].to_numpy()) for (rank,), rows in ends.items()]
        )
        assert aligned.dtype == np.int64
        assert np.ptp(aligned, axis=0).max() <= 10
        assert aligned[0].tolist() == ends[0,]["end_ns"].to_list()

    def test_lost_rows(self, open_run: OpenRun) -> None:
        scenario = dataclasses.replace(APART, lost=dict.fromkeys(range(6), 0.3))
        assert_found(scenario, clock_offsets(open_run(scenario)))

    def test_steps_can_be_chosen(self, open_run: OpenRun) -> None:
        found = clock_offsets(open_run(APART, steps=(40, 80)))
        assert_found(APART, found)
        assert found.ranks["collectives"].to_list() == [40] * 6

    @pytest.mark.parametrize("seed", range(3))
    def test_a_rank_that_is_often_late_to_leave_moves_nothing(self, open_run: OpenRun, seed: int) -> None:
        run = simulate(dataclasses.replace(APART, exit_ns=20 * US, seed=seed))
        held_up = (pl.col("rank") == 3) & (pl.col("step") % 5 == 0)
        late = pl.when(held_up).then(pl.col("end_ns") + 80 * MS).otherwise("end_ns")
        found = clock_offsets(open_run(dataclasses.replace(run, collectives=run.collectives.with_columns(late))))
        assert_found(APART, found)
        assert found.hosts["error_ns"].max() < 500 * US  # type: ignore[operator]

    def test_real_ranks_of_one_machine_have_one_clock(self) -> None:
        """Each is taken for a host of its own; that their clock is one is known, and how each anchored it."""
        for path in FIXTURES.iterdir():
            if path.is_dir():
                run = load(path)
                apart: Any = {rank: {**one, "host": f"host-{rank}"} for rank, one in run.metadata.items()}
                found = clock_offsets(dataclasses.replace(run, metadata=apart))
                anchors = [
                    one["clock"]["anchor_epoch_ns"] - one["clock"]["anchor_monotonic_ns"] for one in apart.values()
                ]
                truth = np.array(anchors) - anchors[0]
                assert (np.abs(found.hosts["offset_ns"].to_numpy() - truth) <= found.hosts["error_ns"].to_numpy()).all()
                assert found.hosts["error_ns"].max() < 10 * MS  # type: ignore[operator]


@st.composite
def clocks(draw: st.DrawFn) -> Scenario:
    ranks = draw(st.integers(2, 5))
    hosts = range(ranks)
    return Scenario(
        ranks=ranks,
        ranks_per_host=1,
        steps=draw(st.integers(30, 60)),
        buckets=2,
        noise=draw(st.sampled_from([0.02, 0.2])),
        exit_ns=draw(st.sampled_from([0, 30 * US, 1 * MS])),
        clock_offset_ns={host: draw(st.integers(-9, 9)) * HOUR_NS + draw(st.integers(0, MS)) for host in hosts},
        clock_drift_ppm={host: draw(st.sampled_from([-100.0, 0.0, 100.0])) for host in hosts},
        faults=(Fault(rank=1, cause="forward", delay_ns=20 * MS),),
        seed=draw(st.integers(0, 1000)),
    )


@FEW
@given(scenario=clocks())
def test_any_clock_is_found_within_its_error_bar(scenario: Scenario) -> None:
    assert_found(scenario, offsets_of(simulate(scenario)))


@FEW
@given(scenario=clocks(), data=st.data())
def test_permuting_ranks_permutes_the_clocks(scenario: Scenario, data: st.DataObject) -> None:
    run = simulate(scenario)
    new = dict(enumerate(data.draw(st.permutations(range(scenario.ranks)))))
    renamed = pl.col("rank").replace_strict(new, return_dtype=pl.UInt32)
    metadata: Any = {new[rank]: {**one, "rank": new[rank]} for rank, one in run.metadata.items()}
    other = dataclasses.replace(
        run,
        steps=run.steps.with_columns(renamed),
        collectives=run.collectives.with_columns(renamed),
        metadata=metadata,
    )
    before, after = offsets_of(run), offsets_of(other)
    # The reference is another clock now; how any two clocks are apart at one moment is the same.
    moments = {rank: run.collectives.filter(rank=rank)["end_ns"].to_numpy()[-40:] for rank in new}
    on_old = np.stack([before.onto_reference(rank, moments[rank]) for rank in new])
    on_new = np.stack([after.onto_reference(new[rank], moments[rank]) for rank in new])
    change = np.abs((on_old - on_old[0]) - (on_new - on_new[0])).max()
    # Differences of milliseconds, on clocks that seem to run differently by some hundred millionths.
    assert change < 10 * US


@FEW
@given(scenario=clocks(), hours=st.integers(-100, 100), rank=st.integers(0, 4))
def test_shifting_a_clock_changes_no_number_that_needs_none(scenario: Scenario, hours: int, rank: int) -> None:
    run = simulate(dataclasses.replace(scenario, steps=90))
    by_rank = pl.when(pl.col("rank") == rank % scenario.ranks).then(hours * HOUR_NS + 1).otherwise(0)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before = load(write_log(run, first))
        after = load(write_log(moved(run, lambda moment: moment + by_rank), second))
        assert stragglers(before).verdict == stragglers(after).verdict
        assert_frame_equal(whatif(before).scenarios, whatif(after).scenarios)
        assert_frame_equal(whatif(before).ranks, whatif(after).ranks)
        assert_frame_equal(change_points(before).changes, change_points(after).changes)
        names = ("rank", "collectives", "wait_ns", "transfer_ns")
        assert_frame_equal(clock_offsets(before).waits.select(names), clock_offsets(after).waits.select(names))


def test_drifting_clocks_change_no_number_that_needs_none(open_run: OpenRun) -> None:
    steady = dataclasses.replace(APART, clock_drift_ppm={}, faults=(Fault(rank=4, cause="data", delay_ns=9 * MS),))
    before = open_run(steady)
    # Four hours of drift in a step: far more than any clock, and still a ten-thousandth of each duration.
    after = open_run(dataclasses.replace(steady, clock_drift_ppm=APART.clock_drift_ppm, run="20260102T030405-0badc10c"))
    first, second = stragglers(before).verdict, stragglers(after).verdict
    assert (
        (first.kind, first.rank, first.cause) == (second.kind, second.rank, second.cause) == ("persistent", 4, "data")
    )
    assert first.delay_ns == pytest.approx(second.delay_ns, rel=2e-3)
    columns = ["slowdown", "waste"]
    assert_frame_equal(whatif(before).ranks.select(columns), whatif(after).ranks.select(columns), abs_tol=1e-3)


class TestHosts:
    def test_a_rank_with_another_clock_than_its_host(self, open_run: OpenRun) -> None:
        run = simulate(dataclasses.replace(APART, ranks_per_host=3))
        by_rank = pl.when(pl.col("rank") == 4).then(2 * HOUR_NS).otherwise(0)
        found = clock_offsets(open_run(moved(run, lambda moment: moment + by_rank)))
        assert found.ranks["shares_host_clock"].to_list() == [True, True, True, True, False, True]
        assert found.ranks["residual_ns"][4] == pytest.approx(2 * HOUR_NS, abs=MS)
        moment = run.collectives.filter(rank=4)["end_ns"].to_numpy()[-1:]
        same = found.onto_reference(5, moment)
        assert found.onto_reference(4, moment + 2 * HOUR_NS) == pytest.approx(same, abs=500 * US)

    def test_two_ranks_that_disagree_have_no_common_clock(self, open_run: OpenRun) -> None:
        run = simulate(APART)
        by_rank = pl.when(pl.col("rank") == 4).then(2 * HOUR_NS).otherwise(0)
        found = clock_offsets(open_run(moved(run, lambda moment: moment + by_rank)))
        host = found.hosts.row(2, named=True)
        assert (host["host"], host["offset_ns"], host["error_ns"]) == ("host-002", None, None)
        assert host["reason"] == "none of its ranks can be aligned, or they do not share a clock"
        assert found.ranks["offset_ns"].null_count() == 0

    def test_the_reference_need_not_share_a_clock(self, open_run: OpenRun) -> None:
        run = simulate(APART)
        by_rank = pl.when(pl.col("rank") == 1).then(2 * HOUR_NS).otherwise(0)
        found = clock_offsets(open_run(moved(run, lambda moment: moment + by_rank)))
        assert found.hosts["offset_ns"][0] is None
        assert found.ranks["offset_ns"][:2].to_list() == pytest.approx([0, 2 * HOUR_NS], abs=MS)


class TestGroups:
    GROUPS: Mapping[int, Sequence[int]] = {0: (0, 1), 1: (2, 3), 2: (4, 5)}

    def test_groups_are_chained_through_other_collectives(self, open_run: OpenRun) -> None:
        run = simulate(APART)
        bridges = bridging(run, (1, 2, 4), "all_reduce")
        found = clock_offsets(open_run(regrouped(run, self.GROUPS, bridges)))
        assert_found(APART, found)
        assert found.waits.group_by("module", maintain_order=True).len().rows() == [(0, 6), (None, 3)]

    def test_they_are_read_where_steps_were_chosen(self, open_run: OpenRun) -> None:
        run = simulate(APART)
        bridges = bridging(run, (1, 2, 4), "barrier")
        found = clock_offsets(open_run(regrouped(run, self.GROUPS, bridges), steps=(40, 100)))
        assert_found(APART, found)

    def test_what_does_not_hang_together_is_not_aligned(self, open_run: OpenRun) -> None:
        """The root of a broadcast may leave before others come, so it joins no clocks."""
        run = simulate(APART)
        found = clock_offsets(
            open_run(regrouped(run, {0: (0, 1), 1: (2, 3, 4, 5)}, bridging(run, (1, 2), "broadcast")))
        )
        assert (found.reference_rank, found.reference_host) == (2, "host-001")
        assert (
            found.reason
            == "the clocks of ranks 0, 1 cannot be aligned with that of rank 2: too few collectives in common"
        )
        assert found.hosts["offset_ns"].to_list()[0] is None
        assert found.ranks["reason"].to_list()[:3] == [found.ranks["reason"][0], found.ranks["reason"][0], None]
        with pytest.raises(UsageError, match="the clock of rank 1 is not aligned with that of rank 2"):
            found.onto_reference(1, np.zeros(1, np.int64))
        # Within each group both estimators are there all the same.
        assert found.waits["agree"].to_list() == [True] * 6

    def test_one_rank_needs_no_alignment(self, open_run: OpenRun) -> None:
        found = clock_offsets(open_run(dataclasses.replace(APART, ranks=1)))
        assert (found.reason, found.ranks["offset_ns"].to_list(), found.waits.height) == (None, [0], 0)

    @pytest.mark.parametrize("steps", [1, 7])
    def test_too_few_collectives(self, open_run: OpenRun, steps: int) -> None:
        found = clock_offsets(open_run(dataclasses.replace(APART, steps=steps)))
        assert found.reason is not None
        assert found.ranks["reason"][1] == "it shares fewer than 8 collectives with the others"
        assert found.ranks["offset_ns"].to_list() == [0, None, None, None, None, None]

    def test_a_run_without_any_row(self, open_run: OpenRun) -> None:
        run = simulate(APART)
        empty = dataclasses.replace(run, steps=run.steps.clear(), collectives=run.collectives.clear())
        found = clock_offsets(open_run(empty))
        assert found.ranks["offset_ns"].null_count() == 5
        assert found.waits.is_empty()


class TestWaits:
    def test_both_estimators_by_hand(self, open_run: OpenRun, by_hand: SyntheticRun) -> None:
        """Rank 1 launches the last bucket 300 ns later and all leave it together, 200 ns after that."""
        repeated = pl.concat(
            by_hand.collectives.with_columns(
                pl.col("step") + 5 * k, pl.col("seq") + 10 * k, *(pl.col(n) + 5000 * k for n in ("launch_ns", "end_ns"))
            )
            for k in range(4)
        )
        steps = pl.concat(
            by_hand.steps.with_columns(pl.col("step") + 5 * k, *(pl.col("^.*(start|end)_ns$") + 5000 * k,))
            for k in range(4)
        )
        longer = dataclasses.replace(by_hand.scenario, steps=20)
        run = SyntheticRun(
            longer, steps.sort("rank", "step"), repeated.sort("rank", "step", "bucket"), by_hand.metadata
        )
        waits = clock_offsets(open_run(run, skip_warmup=1)).waits
        assert waits["collectives"].to_list() == [19, 19]
        assert waits["wait_ns"].to_list() == [300, 0]
        assert waits["wait_by_launch_ns"].to_list() == pytest.approx([300, 0], abs=1e-3)
        assert waits["transfer_ns"].to_list() == [200, 200]
        assert waits["transfer_by_launch_ns"].to_list() == pytest.approx([200, 200], abs=1e-3)
        assert waits["agree"].to_list() == [True, True]

    def test_a_rank_whose_ends_are_recorded_late_is_told(self, open_run: OpenRun) -> None:
        """By durations rank 3 waits 2 ms more than by launches: its clock is its host's, so the ends must be wrong."""
        run = simulate(dataclasses.replace(APART, ranks_per_host=6, clock_offset_ns={}, clock_drift_ppm={}, noise=0.1))
        late = pl.when(pl.col("rank") == 3).then(pl.col("end_ns") + 2 * MS).otherwise("end_ns")
        found = clock_offsets(open_run(dataclasses.replace(run, collectives=run.collectives.with_columns(late))))
        waits = found.waits
        assert waits["agree"][3] is False
        assert waits["difference_ns"][3] == pytest.approx(2 * MS, rel=0.2)
        # Where rank 3 is the last one, the shortest duration is too long, and so the waits of the others too short.
        assert (waits.filter(pl.col("rank") != 3)["difference_ns"].is_between(-MS, 0)).all()
        assert found.ranks["residual_ns"][3] == pytest.approx(2 * MS, rel=0.1)
        assert found.ranks["shares_host_clock"].all()

    def test_estimators_agree_across_hosts(self, open_run: OpenRun) -> None:
        waits = clock_offsets(open_run(APART)).waits
        assert waits["agree"].to_list() == [True] * 6
        assert (waits["difference_ns"].abs() < 200 * US).all()
        assert (waits["error_ns"] < 600 * US).all()
