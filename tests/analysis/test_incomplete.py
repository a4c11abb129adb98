"""The verdict on runs of which something is missing, or in which ranks meet before their buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpan.analysis.measures.stragglers import stragglers
from ddpan.analysis.measures.summary import summarize
from ddpan.analysis.run import Run, load
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate, write_log
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


class TestMissing:
    def test_a_missing_rank_may_be_the_slow_one(self, open_run: OpenRun) -> None:
        found = stragglers(open_run(without_rank(simulate(faulty(delayed(3))), 3)))
        assert (found.verdict.kind, found.verdict.rank) == ("insufficient_data", None)
        assert "rank 3: its log is missing" in found.verdict.reason
        assert found.ranks.filter(rank=3).select("host", "lateness_ns", "left_out").row(0) == (
            None,
            None,
            "its log is missing",
        )

    def test_a_slow_rank_is_named_although_another_is_missing(self, open_run: OpenRun) -> None:
        verdict = judge(open_run(without_rank(simulate(faulty(delayed(1))), 3)))
        assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 1, "backward")
        assert verdict.lost_gpu_hours == pytest.approx(verdict.lost_seconds * 4 / 3600)

    def test_ranks_left_out_on_purpose_are_not_missing(self, open_run: OpenRun) -> None:
        assert judge(open_run(HEALTHY, ranks=(0, 1, 2))).kind == "none"

    @pytest.mark.parametrize("share", [0.1, 0.3])
    @pytest.mark.parametrize("ranks", [2, 4, 16])
    def test_lost_rows_change_neither_verdict(self, open_run: OpenRun, ranks: int, share: float) -> None:
        lossy = replace(HEALTHY, ranks=ranks, steps=250, lost=dict.fromkeys(range(ranks), share))
        verdict = judge(open_run(faulty(delayed(1), scenario=lossy)))
        assert (verdict.rank, verdict.cause) == (1, "backward")
        assert verdict.delay_low_ns < 20 * MS < verdict.delay_high_ns

    def test_lost_rows_name_nobody(self, open_run: OpenRun) -> None:
        lossy = replace(HEALTHY, steps=250, lost=dict.fromkeys(range(4), 0.3))
        assert stragglers(open_run(lossy)).named == ()

    def test_lost_rows_do_not_lower_the_cost(self, open_run: OpenRun) -> None:
        lossy = faulty(delayed(1), scenario=replace(HEALTHY, lost=dict.fromkeys(range(4), 0.3)))
        verdict = judge(open_run(lossy))
        assert verdict.step_time_ns - verdict.step_time_without_ns == pytest.approx(18.4 * MS, rel=0.08)


ONSET = 110


class TestWhatIsLost:
    """Parts of a log taken away: the verdict stays right, or says that it cannot tell."""

    slow = simulate(faulty(delayed(1), scenario=replace(HEALTHY, ranks=5, steps=200)))
    later = simulate(faulty(delayed(1, first_step=ONSET), scenario=replace(HEALTHY, ranks=5, steps=200)))
    healthy = simulate(replace(HEALTHY, ranks=5, steps=200))

    @settings(max_examples=12, deadline=None)
    @given(
        share=st.floats(0, 0.3),
        seed=st.integers(0, 2**32 - 1),
        missing=st.none() | st.integers(0, 4),
        begin=st.integers(0, 150),
    )
    @example(share=0.3, seed=0, missing=None, begin=60)
    @example(share=0.3, seed=0, missing=3, begin=0)
    def test_never_wrong(self, share: float, seed: int, missing: int | None, begin: int) -> None:
        kept = {
            name: without(run, share, seed, missing, begin) for name, run in (("slow", self.slow), ("ok", self.healthy))
        }
        found: Any = stragglers(in_memory(kept["slow"]))
        if found.named:
            assert [(one.rank, one.cause) for one in found.named] == [(1, "backward")]
            assert found.verdict.kind == "persistent"
        else:
            assert found.verdict.kind == "insufficient_data"
        assert missing == 1 or begin > 100 or found.named
        begun: Any = stragglers(in_memory(without(self.later, share, seed, missing, begin)))
        if begun.named:
            assert [(one.rank, one.cause) for one in begun.named] == [(1, "backward")]
            # With hardly a step left before it, a delay that began is one that was always there.
            assert begun.verdict.kind == "onset" or begin > ONSET - 15
        else:
            assert begun.verdict.kind == "insufficient_data"
        healthy = stragglers(in_memory(kept["ok"]))
        assert healthy.named == ()
        assert healthy.verdict.kind in ("none", "insufficient_data")

    @settings(max_examples=8, deadline=None)
    @given(rank=st.integers(0, 4), begin=st.integers(2, 190))
    def test_the_beginning_of_one_rank(self, rank: int, begin: int) -> None:
        here = (pl.col("rank") != rank) | (pl.col("step") >= begin)
        for run in (self.slow, self.healthy):
            steps, collectives = run.steps.filter(here), run.collectives.filter(here)
            found = stragglers(in_memory(SyntheticRun(run.scenario, steps, collectives, run.metadata)))
            if run is self.slow and found.named:
                assert [(one.kind, one.rank, one.cause) for one in found.named] == [("persistent", 1, "backward")]
            else:
                assert found.named == ()
                silent = ("insufficient_data",) if run is self.slow else ("none", "insufficient_data")
                assert found.verdict.kind in silent


class TestOtherCollectives:
    """Rank 0 broadcasts buffers at the start of the forward; it is late, and the others wait there, not at a bucket."""

    late = tuple(delayed(rank, "forward" if rank else "data") for rank in range(4))

    def test_without_the_broadcast_nobody_is_late(self, open_run: OpenRun) -> None:
        assert stragglers(open_run(faulty(*self.late))).named == ()

    @pytest.mark.parametrize("steps", [None, (10, 110)])
    @pytest.mark.parametrize("broadcasts", [1, 2])
    def test_waiting_in_a_broadcast_is_not_charged_to_the_waiting(
        self, tmp_path: Path, steps: tuple[int, int] | None, broadcasts: int
    ) -> None:
        run = with_broadcasts(simulate(faulty(*self.late)), [0.3, 20.3, 20.3, 20.3], number=broadcasts)
        found = stragglers(load(write_log(without_steps(run), tmp_path), steps=steps))
        verdict: Any = found.verdict
        assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", 0, "data")
        assert verdict.delay_ns == pytest.approx(20 * MS, rel=0.05)
        assert verdict.step_time_ns - verdict.step_time_without_ns == pytest.approx(19 * MS, rel=0.05)
        waits = found.ranks.sort("rank")["wait_ns"].to_list()
        assert waits[0] < 1 * MS < 19 * MS < min(waits[1:])

    def test_the_split_of_the_step_calls_it_waiting(self, tmp_path: Path) -> None:
        run = with_broadcasts(simulate(faulty(*self.late)), [0.3, 20.3, 20.3, 20.3])
        found = summarize(load(write_log(without_steps(run), tmp_path)))
        split = dict(found.step_split.select("part", "mean_ns").iter_rows())
        assert split["forward"] == pytest.approx(20 * MS, rel=0.02)
        assert split["wait"] == pytest.approx(15.5 * MS, rel=0.1)
        assert sum(split.values()) == pytest.approx(89 * MS, rel=0.02)

    def test_a_collective_beside_the_work_takes_nothing_from_it(self, tmp_path: Path) -> None:
        # Begun before the forward ends and ended after it: the rank did not stand still.
        run = with_broadcasts(simulate(faulty(delayed(1, "forward"))), [5, 25, 25, 25], after_ms=18)
        found = stragglers(load(write_log(without_steps(run), tmp_path)))
        assert (found.verdict.rank, found.verdict.cause) == (1, "forward")
        assert found.verdict.delay_ns == pytest.approx(20 * MS, rel=0.05)


def test_a_wait_that_reaches_into_the_next_step_is_not_charged_to_the_waiting(open_run: OpenRun) -> None:
    """Rank 1 shares its layers with a rank of another group, which holds it up after its last bucket."""
    run = simulate(faulty(delayed(1, "other")))
    held_up = stragglers(open_run(run)).verdict
    assert (held_up.kind, held_up.rank) == ("persistent", 1)
    [wait] = [fault.delay_ns for fault in run.scenario.faults]
    leaving = run.collectives.filter(rank=1).group_by("rank", "step").agg(pl.col("end_ns").max()).sort("step")
    rows = leaving.select(
        "rank",
        group=pl.lit(1, pl.UInt16),
        seq=pl.col("step").cast(pl.UInt64),
        op=pl.lit("all_reduce", run.collectives.schema["op"]),
        bytes=pl.lit(4096, pl.UInt64),
        launch_ns=pl.col("end_ns") - MS,
        wait_start_ns=pl.col("end_ns") - MS,
        end_ns=pl.col("end_ns") + wait,
    )
    run.metadata[1]["groups"]["1"] = {"name": "1", "ranks": [1, 7], "backend": "gloo"}
    waiting = SyntheticRun(run.scenario, run.steps, pl.concat([run.collectives, rows], how="diagonal"), run.metadata)
    assert stragglers(open_run(waiting)).verdict.kind == "none"


def with_broadcasts(
    run: SyntheticRun, lengths_ms: list[float], *, number: int = 1, after_ms: float = 0.01
) -> SyntheticRun:
    """Add broadcasts in a group of their own to each forward, so long on each rank; several are in flight together."""
    for metadata in run.metadata.values():
        metadata["groups"]["1"] = metadata["groups"]["0"]
    length = pl.col("rank").replace_strict(dict(enumerate(lengths_ms)), return_dtype=pl.Float64) * MS
    begin = pl.col("forward_start_ns") + round(after_ms * MS)
    rows = [
        run.steps.select(
            "rank",
            group=pl.lit(1, pl.UInt16),
            seq=pl.col("step").cast(pl.UInt64) * number + k,
            step="step",
            op=pl.lit("broadcast", run.collectives.schema["op"]),
            bytes=pl.lit(4096, pl.UInt64),
            launch_ns=begin + k * 1000,
            end_ns=begin + length.cast(pl.Int64),
        )
        for k in range(number)
    ]
    return SyntheticRun(run.scenario, run.steps, pl.concat([run.collectives, *rows], how="diagonal"), run.metadata)


def without_steps(run: SyntheticRun) -> SyntheticRun:
    """``run`` in which, as in every log, collectives that are no buckets belong to no step."""
    step = pl.when(pl.col("module").is_not_null()).then("step")
    return SyntheticRun(run.scenario, run.steps, run.collectives.with_columns(step=step), run.metadata)


def without(run: SyntheticRun, share: float, seed: int, rank: int | None, begin: int) -> SyntheticRun:
    """``run`` without a share of its rows at random, without a rank, and from a step on."""
    kept = without_rank(run, rank) if rank is not None else run
    random = np.random.default_rng(seed)
    steps, collectives = (
        table.filter(pl.Series(random.random(table.height) >= share) & (table["step"] >= begin))
        for table in (kept.steps, kept.collectives)
    )
    return SyntheticRun(run.scenario, steps, collectives, kept.metadata)


def without_rank(run: SyntheticRun, rank: int) -> SyntheticRun:
    kept = {name: one for name, one in run.metadata.items() if name != rank}
    steps, collectives = (table.filter(pl.col("rank") != rank) for table in (run.steps, run.collectives))
    return SyntheticRun(run.scenario, steps, collectives, kept)
