"""DDP on a GPU: NCCL with one rank, gloo on device tensors with one and two. It needs a GPU.

What can be tested without one is in tests/collector/test_device_time.py and test_device_records.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
import torch
from tests.end_to_end.scripts.on_cuda import DELAY_NS, STEPS

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NCCL = ("nccl", 1)
GLOO = [("gloo", 1), ("gloo", 2)]


class Recorded:
    """A training with and without the collector."""

    def __init__(self, outcome: Outcome, plain: Outcome, run: RunLog) -> None:
        self.outcome = outcome
        self.plain = plain
        self.run = run


@pytest.fixture(scope="module")
def train(
    launch: Callable[..., Outcome], read_runs: Callable[[Path], list[RunLog]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Recorded]:
    known: dict[tuple[str, int], Recorded] = {}

    def trained(backend: str, ranks: int) -> Recorded:
        if (backend, ranks) not in known:
            logs = tmp_path_factory.mktemp("logs")
            plain = launch("on_cuda", backend, ranks=ranks)
            outcome = launch("on_cuda", backend, ranks=ranks, log_dir=logs)
            [run] = read_runs(logs)
            known[backend, ranks] = Recorded(outcome, plain, run)
        return known[backend, ranks]

    return trained


@pytest.fixture(params=[NCCL, *GLOO], ids=lambda param: f"{param[0]}-{param[1]}")
def recorded(request: pytest.FixtureRequest, train: Callable[[str, int], Recorded]) -> Recorded:
    return train(*request.param)


def test_training_is_unchanged_and_all_is_recorded(recorded: Recorded) -> None:
    for rank, log in recorded.run.ranks.items():
        assert recorded.outcome.facts(rank)["hash"] == recorded.plain.facts(rank)["hash"]
        counters = log.metadata["counters"]
        assert (counters["errors"], set(counters["dropped"].values())) == (0, {0})
        assert log.steps.height == STEPS
        assert log.buckets.height >= 2 * STEPS
        assert log.metadata["device"] == "cuda"


def test_host_waits_for_the_device_no_more_often(recorded: Recorded) -> None:
    for rank in recorded.run.ranks:
        assert recorded.outcome.facts(rank)["waits"] == recorded.plain.facts(rank)["waits"]


def test_times_are_there_and_in_order(recorded: Recorded) -> None:
    for log in recorded.run.ranks.values():
        rows = log.buckets
        assert rows["end_ns"].null_count() == 0
        assert (rows["launch_ns"] <= rows["end_ns"]).all()
        steps = log.steps
        for before, after in (
            ("forward_start_ns", "forward_end_ns"),
            ("forward_end_ns", "compute_end_ns"),
            ("compute_end_ns", "backward_end_ns"),
            ("optimizer_start_ns", "optimizer_end_ns"),
        ):
            assert (steps[before] <= steps[after]).all(), (before, after)


def test_times_are_the_devices(train: Callable[[str, int], Recorded]) -> None:
    """The device was busy in the middle of the backward; the host had issued everything at once."""
    log: RankLog = train(*NCCL).run.ranks[0]
    steps = log.steps.slice(2)
    assert (steps["compute_end_ns"] - steps["forward_end_ns"] > 0.9 * DELAY_NS).all()
    rows = log.buckets.filter(pl.col("step") >= 2).sort("step", "bucket")
    assert rows["start_ns"].null_count() == 0
    assert (rows["launch_ns"] <= rows["start_ns"]).all()
    assert (rows["start_ns"] <= rows["end_ns"]).all()
    apart = rows.group_by("step").agg((pl.col("launch_ns").max() - pl.col("launch_ns").min()).alias("apart_ns"))
    assert (apart["apart_ns"] > 0.9 * DELAY_NS).all()
