"""The summary: everything that the reports show, and nothing that contradicts its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest

from ddpan.analysis.measures.facts import facts
from ddpan.analysis.measures.summary import PARTS, summarize
from ddpan.analysis.run import Run
from ddpan.analysis.testing import Fault, Scenario, SyntheticRun, simulate

OpenRun = Callable[..., Run]
MS = 1_000_000
SCENARIO = Scenario(ranks=4, ranks_per_host=2, steps=60, noise=0.01)


def test_parts_add_up_to_the_step(open_run: OpenRun) -> None:
    found = summarize(open_run(SCENARIO))
    assert found.step_split["part"].to_list() == list(PARTS)
    assert found.step_split["share"].sum() == pytest.approx(1)
    assert found.step_split["mean_ns"].sum() == pytest.approx(found.modules["step_time_mean_ns"][0])
    expected = {"data": 1, "forward": 20, "before_first_bucket": 5, "backward": 35, "optimizer": 4, "transfer": 3}
    parts = {name: value / MS for name, value in found.step_split.select("part", "mean_ns").iter_rows()}
    assert {name: parts[name] for name in expected} == pytest.approx(expected, rel=0.05)


def test_waiting_for_a_slow_rank_is_a_part_of_the_step(open_run: OpenRun) -> None:
    faults = (Fault(rank=0, cause="data", delay_ns=40 * MS),)
    found = summarize(open_run(replace(SCENARIO, noise=0.0, faults=faults)))
    parts = {name: value / MS for name, value in found.step_split.select("part", "mean_ns").iter_rows()}
    assert parts["wait"] == pytest.approx(40 * 3 / 4, rel=1e-3)  # three of four ranks wait 40 ms
    assert parts["data"] == pytest.approx(1 + 40 / 4, rel=1e-3)


def test_what_the_run_was(open_run: OpenRun) -> None:
    run = open_run(SCENARIO)
    found = summarize(run)
    assert found.run == run.info
    assert found.ranks == (0, 1, 2, 3)
    assert found.hosts == {"host-000": (0, 1), "host-001": (2, 3)}
    assert found.versions == {"ddpan": ("synthetic",)}
    assert found.devices == ("cpu",)
    assert found.missing_ranks == ()
    module = found.modules.row(0, named=True)
    assert (module["name"], module["parameters"], module["parameter_bytes"]) == ("Synthetic", 8, 8 * 25 << 20)
    assert (module["steps"], module["warmup_steps"], module["first_step"], module["last_step"]) == (60, 2, 2, 59)
    assert (module["buckets"], module["bytes"], module["layouts"], module["micro_batches"]) == (8, 8 * 25 << 20, 2, 1)
    assert module["step_time_mean_ns"] == pytest.approx(69 * MS, rel=0.02)


def test_what_is_missing(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    gone = (pl.col("rank") == 1) & (pl.col("step") == 7)
    present = pl.col("rank") != 3
    metadata = {rank: one for rank, one in run.metadata.items() if rank != 3}
    collectives = run.collectives.filter(present & ~gone)
    opened = open_run(SyntheticRun(SCENARIO, run.steps.filter(present), collectives, metadata))
    found = summarize(opened)
    assert found.missing_ranks == (3,)
    assert found.gaps.filter(rank=1).select("collectives_missing", "steps_incomplete").row(0) == (8, 1)
    assert found.modules["incomplete_steps"].to_list() == [1]
    assert {"missing_rank", "seq_gap"} <= {problem.kind for problem in found.problems}
    assert found.problems == facts(opened).problems


def test_versions_that_differ_are_all_shown(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    for rank, metadata in run.metadata.items():
        metadata["versions"] = {"torch": "2.14.1" if rank == 2 else "2.13.0"}
    assert summarize(open_run(run)).versions == {"torch": ("2.13.0", "2.14.1")}


@pytest.mark.parametrize(
    ("skip_warmup", "rule"),
    [
        (
            None,
            "the first 2 steps of each module, and every step before DDP rebuilt its buckets, are left out as warm-up",
        ),
        (5, "the first 5 steps of each module are left out as warm-up, as asked"),
    ],
)
def test_the_warmup_rule_is_stated(open_run: OpenRun, skip_warmup: int | None, rule: str) -> None:
    found = summarize(open_run(SCENARIO, skip_warmup=skip_warmup))
    assert found.warmup_rule == rule
    assert found.modules["warmup_steps"].to_list() == [2 if skip_warmup is None else skip_warmup]


def test_a_run_without_any_step(open_run: OpenRun) -> None:
    run = simulate(SCENARIO)
    found = summarize(open_run(SyntheticRun(SCENARIO, run.steps.clear(), run.collectives.clear(), run.metadata)))
    assert found.stragglers.verdict.kind == "insufficient_data"
    assert found.step_split.is_empty()
    assert found.overlap.reason is not None


def test_progress_reaches_the_end(open_run: OpenRun) -> None:
    shares: list[float] = []
    summarize(open_run(SCENARIO, steps_per_part=20), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
