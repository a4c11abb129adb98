"""The statistics of the DDP logger's windows, against numpy on values built here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from ddpan.analysis.measures.statistics import WINDOWS, statistics
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate

OpenRun = Callable[..., Run]
SCENARIO = Scenario(ranks=3, steps=40, buckets=4, noise=0.2, seed=3)


def windows_by_hand(run: SyntheticRun, rank: int, first_step: int) -> dict[str, npt.NDArray[Any]]:
    """The four windows of a rank from its rows alone, as PyTorch's logger defines them."""
    steps = run.steps.filter((pl.col("rank") == rank) & (pl.col("step") >= first_step)).sort("step")
    buckets = run.collectives.filter((pl.col("rank") == rank) & (pl.col("step") >= first_step))
    launch = buckets.group_by("step").agg(pl.col("launch_ns").min()).sort("step")["launch_ns"].to_numpy()
    start, end = steps["forward_start_ns"].to_numpy(), steps["forward_end_ns"].to_numpy()
    compute, backward = steps["compute_end_ns"].to_numpy(), steps["backward_end_ns"].to_numpy()
    return {
        "forward": end - start,
        "backward_compute": compute - end,
        "backward_comm": backward - launch,
        "overlap": compute - launch,
    }


def row(table: pl.DataFrame, **keys: Any) -> dict[str, Any]:
    return table.filter(**keys).row(0, named=True)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_statistic_of_a_rank_is_numpy_s(open_run: OpenRun, window: str, rank: int) -> None:
    run = simulate(SCENARIO)
    values = windows_by_hand(run, rank, first_step=2)[window].astype(float)
    found = row(statistics(open_run(run)).per_rank, rank=rank, window=window)
    assert found["n"] == 38
    expected = {
        "mean_ns": values.mean(),
        "variance_ns2": values.var(ddof=1),
        "std_ns": values.std(ddof=1),
        "min_ns": values.min(),
        "p50_ns": np.percentile(values, 50),
        "p95_ns": np.percentile(values, 95),
        "p99_ns": np.percentile(values, 99),
        "max_ns": values.max(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_overall_is_over_the_steps_of_all_ranks(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    values = np.concatenate([windows_by_hand(run, rank, first_step=2)["backward_comm"] for rank in range(3)])
    found = row(statistics(open_run(run)).overall, window="backward_comm")
    assert found["n"] == 3 * 38
    assert found["mean_ns"] == pytest.approx(values.mean())
    assert found["variance_ns2"] == pytest.approx(values.var(ddof=1))


def test_warmup_is_apart(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    values = np.concatenate([windows_by_hand(run, rank, first_step=0)["forward"][:2] for rank in range(3)])
    found = row(statistics(open_run(run)).warmup, window="forward")
    assert found["n"] == 6
    assert found["mean_ns"] == pytest.approx(values.mean())


def test_a_window_counts_only_the_steps_in_which_it_is_known(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    unknown = (pl.col("rank") == 1) & pl.col("step").is_between(10, 14)
    steps = run.steps.with_columns(backward_end_ns=pl.when(~unknown).then("backward_end_ns"))
    table = statistics(open_run(SyntheticRun(SCENARIO, steps, run.collectives, run.metadata))).per_rank
    assert row(table, rank=1, window="backward_comm")["n"] == 33
    assert row(table, rank=1, window="forward")["n"] == 38
    assert row(table, rank=0, window="backward_comm")["n"] == 38


def test_one_step_has_no_variance(open_run: OpenRun) -> None:
    found = row(statistics(open_run(SCENARIO, steps=(20, 21))).per_rank, rank=0, window="forward")
    assert (found["n"], found["variance_ns2"], found["std_ns"]) == (1, None, None)
    assert found["mean_ns"] == found["max_ns"]


def test_rows_are_in_the_order_of_the_windows(open_run: OpenRun) -> None:
    table = statistics(open_run(SCENARIO)).per_rank
    assert table["window"].to_list() == [*WINDOWS] * 3
    assert table["rank"].to_list() == [rank for rank in range(3) for _ in WINDOWS]


def test_no_steps_outside_warmup_give_empty_tables(open_run: OpenRun) -> None:
    found = statistics(open_run(SCENARIO, skip_warmup=1000))
    assert found.per_rank.is_empty()
    assert found.overall.is_empty()
    assert row(found.warmup, window="forward")["n"] == 120
