"""Trainings without DDP: FSDP2's steps and reduce-scatters, and steps by the optimizer where nothing else is known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from tests.end_to_end.scripts.sharded import DELAY_SECONDS, SLOW_RANK

from ddpan.analysis import load, stragglers

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

STEPS, MICRO_BATCHES, LAYERS = 4, 2, 3
LAYER_BYTES = 4 * 32 * 33


@pytest.fixture(scope="module")
def record(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Outcome, RunLog]]:
    """Runs a training of the script, once, with the collector."""
    known: dict[str, tuple[Outcome, RunLog]] = {}

    def train(name: str) -> tuple[Outcome, RunLog]:
        if name not in known:
            logs = tmp_path_factory.mktemp("logs")
            outcome = launch("sharded", name, log_dir=logs)
            [run] = read_runs(logs)
            known[name] = outcome, run
        return known[name]

    return train


@pytest.fixture(params=[0, 1])
def sharded(record: Callable[[str], tuple[Outcome, RunLog]], request: pytest.FixtureRequest) -> RankLog:
    return record("sharded")[1].ranks[request.param]


@pytest.fixture(params=[0, 1])
def by_hand(record: Callable[[str], tuple[Outcome, RunLog]], request: pytest.FixtureRequest) -> RankLog:
    return record("by_hand")[1].ranks[request.param]


@pytest.mark.parametrize("name", ["sharded", "by_hand"])
def test_weights_are_the_same_to_the_bit(
    record: Callable[[str], tuple[Outcome, RunLog]], launch: Callable[..., Outcome], name: str
) -> None:
    plain = launch("sharded", name)
    for rank in (0, 1):
        assert record(name)[0].facts(rank) == plain.facts(rank)


def test_steps_of_a_sharded_model(sharded: RankLog) -> None:
    [module] = sharded.metadata["modules"].values()
    assert (module["kind"], module["name"], module["parameter_bytes"]) == ("fsdp", "Layers", LAYERS * LAYER_BYTES)
    expected = [(s, m, m == MICRO_BATCHES - 1) for s in range(STEPS) for m in range(MICRO_BATCHES)]
    assert sharded.steps.select("step", "micro_batch", "synced").rows() == expected
    names = ("forward_start", "forward_end", "compute_end", "backward_end", "optimizer_start", "optimizer_end")
    for row in sharded.steps.filter("synced").iter_rows(named=True):
        for before, after in pairwise(f"{name}_ns" for name in names):
            assert row[before] <= row[after], (before, after)


def test_reduce_scatters_are_the_buckets(sharded: RankLog) -> None:
    for step in range(STEPS):
        rows = sharded.buckets.filter(step=step)
        assert rows.select("op", "bucket", "bytes").rows() == [
            ("reduce_scatter", k, LAYER_BYTES) for k in range(LAYERS)
        ]
    [buckets] = sharded.metadata["layouts"]["0"].values()
    backwards = reversed(range(LAYERS))
    assert [set(one["parameters"]) for one in buckets] == [
        {f"linear.{k}.weight", f"linear.{k}.bias"} for k in backwards
    ]
    assert set(sharded.collectives["op"]) == {"reduce_scatter", "all_gather", "barrier"}
    assert sharded.collectives.filter(op="reduce_scatter").height == STEPS * LAYERS
    assert sharded.collectives["end_ns"].null_count() == 0
    assert sharded.metadata["counters"]["errors"] == 0


def test_without_any_module_a_step_ends_with_the_optimizer(by_hand: RankLog) -> None:
    [module] = by_hand.metadata["modules"].values()
    assert (module["kind"], module["name"], module["parameter_bytes"]) == ("optimizer", "SGD", LAYERS * LAYER_BYTES)
    rows = by_hand.steps
    # The first is left out: nobody knows when it began.
    assert rows.select("step", "micro_batch", "synced").rows() == [(s, 0, True) for s in range(STEPS - 1)]
    assert rows["optimizer_end_ns"].null_count() == 0
    assert rows["forward_end_ns"].null_count() == STEPS - 1
    # A step begins where the one before ended, and what it reduced lies in it.
    for before, after in pairwise(rows.iter_rows(named=True)):
        assert 0 <= after["forward_start_ns"] - before["optimizer_end_ns"] < 10_000_000
    reduced = by_hand.collectives.filter(op="all_reduce")
    assert reduced.height == STEPS * 2 * LAYERS
    # Reductions between steps are their buckets, from the step on that begins when the optimizer is known.
    expected = [(step, bucket) for step in range(1, STEPS - 1) for bucket in range(2 * LAYERS)]
    assert by_hand.buckets.select("step", "bucket").rows() == expected
    for row in rows.iter_rows(named=True):
        within = pl.col("launch_ns").is_between(row["forward_start_ns"], row["optimizer_start_ns"])
        assert reduced.filter(within).height == 2 * LAYERS


def test_the_late_rank_of_gradients_reduced_by_hand_is_named(
    launch: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """That all ranks meet in each reduction hides it no more than the metric that is averaged in some of the steps."""
    logs = tmp_path_factory.mktemp("logs")
    launch("sharded", "by_hand_slow", ranks=3, log_dir=logs)
    verdict = stragglers(load(logs)).verdict
    assert (verdict.kind, verdict.rank) == ("persistent", SLOW_RANK)
    assert verdict.delay_ns is not None
    assert 0.5e9 * DELAY_SECONDS < verdict.delay_ns < 2e9 * DELAY_SECONDS
