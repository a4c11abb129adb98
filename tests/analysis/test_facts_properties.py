"""What must hold of the facts of any run, whoever its ranks, whatever their clocks, however its files are cut."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ddpan.analysis.measures.facts import Facts, facts
from ddpan.analysis.run import load
from ddpan.analysis.testing import CAUSES, Fault, Scenario, SyntheticRun, simulate, write_log

FEW = settings(max_examples=15, deadline=None)
MOMENTS = ("forward_start_ns", "step_start_ns", "step_end_ns")
HOUR_NS = 3_600_000_000_000


@st.composite
def runs(draw: st.DrawFn) -> SyntheticRun:
    ranks = draw(st.integers(2, 6))
    fault = Fault(
        rank=draw(st.integers(0, ranks - 1)),
        cause=draw(st.sampled_from(CAUSES)),
        delay_ns=draw(st.integers(0, 30_000_000)),
    )
    return simulate(
        Scenario(
            ranks=ranks,
            steps=draw(st.integers(1, 24)),
            buckets=draw(st.integers(1, 6)),
            micro_batches=draw(st.integers(1, 3)),
            noise=draw(st.sampled_from([0.0, 0.02, 0.3])),
            transfer_noise=0.3,
            rebuilt=draw(st.booleans()),
            faults=(fault,),
            seed=draw(st.integers(0, 1000)),
        )
    )


def facts_of(run: SyntheticRun, *, steps_per_part: int = 1000) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        return facts(load(write_log(run, folder, steps_per_part=steps_per_part)))


def with_ranks(run: SyntheticRun, new: Mapping[int, int]) -> SyntheticRun:
    renamed = pl.col("rank").replace_strict(new, return_dtype=pl.UInt32)
    metadata: Any = {new[rank]: {**one, "rank": new[rank]} for rank, one in run.metadata.items()}
    return dataclasses.replace(
        run,
        steps=run.steps.with_columns(renamed),
        collectives=run.collectives.with_columns(renamed),
        metadata=metadata,
    )


def shifted(frame: pl.DataFrame, shift_ns: Mapping[int, int]) -> pl.DataFrame:
    times = [n for n in frame.columns if n.endswith("_ns") and n != "data_wait_ns"]
    by_rank = pl.col("rank").replace_strict(shift_ns, return_dtype=pl.Int64)
    return frame.with_columns(pl.col(*times) + by_rank)


@FEW
@given(run=runs(), data=st.data())
def test_permuting_ranks_permutes_the_facts(run: SyntheticRun, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(run.scenario.ranks)))
    new = dict(enumerate(order))
    before, after = facts_of(run), facts_of(with_ranks(run, new))
    renamed = pl.col("rank").replace_strict(new, return_dtype=pl.UInt32)
    keys = ["module", "layout", "bucket", "rank"]
    assert_frame_equal(before.steps.with_columns(renamed).sort("step", "rank"), after.steps)
    assert_frame_equal(before.buckets.with_columns(renamed).sort(keys), after.buckets, rel_tol=1e-9, abs_tol=1e-3)


@FEW
@given(run=runs(), data=st.data())
def test_shifting_clocks_moves_moments_and_nothing_else(run: SyntheticRun, data: st.DataObject) -> None:
    shift = {rank: data.draw(st.integers(-100_000, 100_000)) * HOUR_NS + rank for rank in range(run.scenario.ranks)}
    moved = dataclasses.replace(run, steps=shifted(run.steps, shift), collectives=shifted(run.collectives, shift))
    before, after = facts_of(run), facts_of(moved)
    assert_frame_equal(before.steps.drop(MOMENTS), after.steps.drop(MOMENTS))
    assert_frame_equal(before.buckets, after.buckets)
    by_rank = pl.col("rank").replace_strict(shift, return_dtype=pl.Int64)
    assert_frame_equal(before.steps.select(pl.col(MOMENTS) + by_rank), after.steps.select(MOMENTS))


@FEW
@given(run=runs(), per_part=st.integers(1, 9))
def test_cutting_the_files_changes_nothing(run: SyntheticRun, per_part: int) -> None:
    whole, cut = facts_of(run), facts_of(run, steps_per_part=per_part)
    assert_frame_equal(whole.steps, cut.steps)
    assert_frame_equal(whole.buckets, cut.buckets, rel_tol=1e-9, abs_tol=1e-3)
    assert_frame_equal(whole.gaps, cut.gaps)


@FEW
@given(run=runs(), share=st.floats(0.0, 0.4), seed=st.integers(0, 100))
def test_losing_rows_makes_facts_unknown_but_never_wrong(run: SyntheticRun, share: float, seed: int) -> None:
    scenario = dataclasses.replace(run.scenario, lost=dict.fromkeys(range(run.scenario.ranks), share), seed=seed)
    whole, poor = facts_of(simulate(dataclasses.replace(scenario, lost={}))), facts_of(simulate(scenario))
    keys = ["module", "step", "rank"]
    both = poor.steps.join(whole.steps, on=keys, suffix="_whole", validate="1:1")
    assert both.height == poor.steps.height
    for name in set(poor.steps.columns) - {*keys, "ranks", "complete", "buckets", "bytes", "warmup"}:
        known = both.filter(pl.col(name).is_not_null())
        if name in ("lateness_ns", "first_lateness_ns", "last", "wait_ns", "transfer_ns"):
            known = known.filter(pl.col("ranks") == pl.col("ranks_whole"))
        if name in ("other_ns",):
            known = known.filter(pl.col("optimizer_ns").is_null() == pl.col("optimizer_ns_whole").is_null())
        assert_frame_equal(known.select(name), known.select(pl.col(f"{name}_whole").alias(name)))


def test_drift_of_a_clock_scales_durations_and_hides_no_lateness() -> None:
    scenario = Scenario(ranks=4, ranks_per_host=2, steps=50, faults=(Fault(rank=1, cause="forward", delay_ns=10**7),))
    drifting = dataclasses.replace(scenario, clock_offset_ns={1: 5 * HOUR_NS}, clock_drift_ppm={1: 100.0})
    before, after = facts_of(simulate(scenario)).steps, facts_of(simulate(drifting)).steps
    on_host_1 = pl.when(pl.col("rank") >= 2).then(1.0001).otherwise(1.0)
    for name in ("step_time_ns", "comm_ns", "forward_ns", "backward_ns", "arrival_ns"):
        expected = before.select(pl.col(name) * on_host_1).to_series()
        assert (after[name] - expected).drop_nulls().to_numpy() == pytest.approx(0, abs=6)
    change = (after["lateness_ns"] - before["lateness_ns"]).abs().drop_nulls().to_numpy()
    assert change.max() <= before["arrival_ns"].drop_nulls().to_numpy().max() * 1e-4 + 6
