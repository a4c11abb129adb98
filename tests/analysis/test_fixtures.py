"""The recordings of real runs in ``fixtures/``: the analysis finds in them what was put in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ddpan.analysis import Facts, Run, facts, find_runs, load, statistics, stragglers
from ddpan.collector.schema import read_spool

FIXTURES = Path(__file__).parents[2] / "fixtures"
TORCH = {
    "healthy": "2.13",
    "slow-backward": "2.14",
    "slow-data": "2.13",
    "slow-forward": "2.14",
    "slow-optimizer": "2.13",
    "accumulation": "2.14",
    "rebuilt": "2.13",
    "killed": "2.14",
    "attempts": "2.13",
}
TAPS = {"2.13": "comm_hook", "2.14": "process_group_hooks"}
ENDED_WELL = [name for name in TORCH if name not in ("killed", "attempts")]
SLOW = {"slow-backward": 2, "slow-data": 1, "slow-forward": 3, "slow-optimizer": 0}
DELAY_MS = 20.0
STEPS = 120
KILLED_IN_STEP = 100
KILLED_RANK = 1
TABLES = ("steps", "collectives")


@cache
def opened(name: str, skip_warmup: int | None = None) -> Run:
    return load(FIXTURES / name, skip_warmup=skip_warmup)


def facts_of(name: str) -> Facts:
    return facts(opened(name))


def rank_folders(name: str) -> list[Path]:
    return sorted((FIXTURES / name).glob("*/rank-*"))


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from strings([key, one])
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def test_every_fixture_is_known_and_all_are_small() -> None:
    assert {path.name for path in FIXTURES.iterdir() if path.is_dir() and any(path.glob("*/rank-*"))} == set(TORCH)
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) < 2_000_000


@pytest.mark.parametrize("name", TORCH)
def test_both_ways_of_seeing_collectives_are_there(name: str) -> None:
    for info in find_runs(FIXTURES / name):
        for metadata in load(FIXTURES / name, run=info.id).metadata.values():
            assert metadata["versions"]["torch"].startswith(TORCH[name] + ".")
            assert metadata["tap"] == TAPS[TORCH[name]]


@pytest.mark.parametrize("name", TORCH)
def test_no_path_of_the_recording_machine_is_inside(name: str) -> None:
    for info in find_runs(FIXTURES / name):
        for metadata in load(FIXTURES / name, run=info.id).metadata.values():
            assert metadata["settings"]["log_dir"] == "logs"
            assert [text for text in strings(metadata) if "/" in text] == []


@pytest.mark.parametrize("name", ENDED_WELL)
def test_nothing_is_missing_of_a_run_that_ended_well(name: str) -> None:
    known = facts_of(name)
    ranks = opened(name).ranks
    assert known.problems == ()
    assert ranks == tuple(range(4 if name == "healthy" or name in SLOW else 2))
    assert known.gaps["steps"].to_list() == [STEPS] * len(ranks)
    assert known.gaps["collectives_missing"].sum() == 0
    assert known.gaps["steps_incomplete"].sum() == 0


def test_nobody_is_named_in_the_healthy_run() -> None:
    assert stragglers(opened("healthy")).verdict.kind == "none"


@pytest.mark.parametrize(("name", "rank"), SLOW.items())
def test_the_slow_rank_its_cause_and_its_delay(name: str, rank: int) -> None:
    result = stragglers(opened(name))
    verdict = result.verdict
    cause = name.removeprefix("slow-")
    assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", rank, cause)
    assert verdict.delay_ns == pytest.approx(DELAY_MS * 1e6, rel=0.25)
    assert verdict.last_share is not None
    assert verdict.last_share > 0.8
    assert [named.rank for named in result.named] == [rank]
    row = result.ranks.row(by_predicate=pl.col("rank") == rank, named=True)
    assert row[f"{cause}_ns"] == pytest.approx(DELAY_MS * 1e6, rel=0.25)


def test_the_bucket_from_which_on_the_slow_backward_shows() -> None:
    """The delay lies between the gradients of layers 4 and 3 of 8; each layer is a bucket, the last is 0."""
    verdict = stragglers(opened("slow-backward")).verdict
    assert verdict.first_late_bucket == 4
    assert set(verdict.first_late_parameters) == {"layers.3.weight", "layers.3.bias"}


@pytest.mark.parametrize(("name", "rank"), SLOW.items())
def test_all_wait_but_the_slow_rank(name: str, rank: int) -> None:
    """In its last bucket, on average; the others wait for what it was given to do."""
    last = facts_of(name).buckets.filter(pl.col("bucket") == pl.col("bucket").max())
    waits = dict(last.select("rank", "wait_median_ns").iter_rows())
    assert waits.pop(rank) < 2e6
    assert min(waits.values()) > 0.5 * DELAY_MS * 1e6


def test_three_forwards_without_reduction_to_each_that_reduces() -> None:
    run = opened("accumulation")
    for rank in run.ranks:
        rows = run.steps().filter(rank=rank).collect()
        assert rows["step"].to_list() == [step for step in range(STEPS) for _ in range(4)]
        assert rows["micro_batch"].to_list() == [0, 1, 2, 3] * STEPS
        assert rows["synced"].to_list() == [False, False, False, True] * STEPS
    steps = facts(run).steps
    assert steps.height == STEPS * 2
    assert set(steps["micro_batches"]) == {4}
    assert stragglers(run).named == ()


def test_the_forward_of_an_accumulated_step_is_the_sum_over_its_micro_batches() -> None:
    run = opened("accumulation")
    both = facts(run).steps.join(
        run.steps()
        .group_by("rank", "step")
        .agg(sum_ns=(pl.col("forward_end_ns") - pl.col("forward_start_ns")).sum())
        .collect(),
        on=["rank", "step"],
    )
    assert both["forward_ns"].to_list() == both["sum_ns"].to_list()
    forward_ns, last_ns = (both[name].to_numpy() for name in ("forward_ns", "c10d_forward_ns"))
    assert forward_ns.min() > 4 * 20e6, "each forward sleeps for 20 ms"
    assert np.median(last_ns / forward_ns) == pytest.approx(1 / 4, abs=0.03)


def ddp() -> Any:
    """What DDP's own logger said in the run ``rebuilt``."""
    return json.loads((FIXTURES / "rebuilt" / "ddp.json").read_text())


def test_layouts_are_those_that_ddp_tells() -> None:
    told = ddp()
    for metadata in opened("rebuilt").metadata.values():
        layouts = metadata["layouts"]["0"]
        assert {number: [bucket["bytes"] for bucket in buckets] for number, buckets in layouts.items()} == {
            "0": told["bucket_bytes"],
            "1": told["rebuilt_bucket_bytes"],
        }
        assert [bucket["parameters"] for bucket in layouts["1"]] == told["rebuilt_bucket_parameters"]
    assert len(told["rebuilt_bucket_bytes"]) > 4


@pytest.mark.parametrize("skip_warmup", [None, 0])
def test_layouts_are_never_averaged_together(skip_warmup: int | None) -> None:
    """The first step alone has the first layout: its mean is that of one collective a rank."""
    run = opened("rebuilt", skip_warmup)
    first_step = 2 if skip_warmup is None else 0
    keys = ["layout", "bucket", "rank"]
    rows = run.collectives().filter(pl.col("bucket").is_not_null(), pl.col("step") >= first_step)
    duration = pl.col("end_ns") - pl.col("launch_ns")
    own = rows.group_by(keys).agg(pl.len(), pl.col("bytes").max(), mean_ns=duration.mean()).collect()
    both = facts(run).buckets.join(own, on=keys, how="full", suffix="_own")
    assert both.height == own.height == 2 * (len(ddp()["rebuilt_bucket_bytes"]) + (skip_warmup == 0))
    assert both["bytes"].to_list() == both["bytes_own"].to_list()
    assert both["duration_mean_ns"].to_list() == pytest.approx(both["mean_ns"].to_list())
    assert set(both.filter(layout=0)["len"]) == ({1} if skip_warmup == 0 else set())


def test_first_layout_is_warm_up() -> None:
    steps = facts_of("rebuilt").steps
    assert set(steps.filter("warmup")["step"]) == {0, 1}
    assert set(steps.filter(step=0)["layout"]) == {0}
    assert set(steps.filter(pl.col("step") > 0)["layout"]) == {1}


@pytest.mark.parametrize("window", range(4))
def test_windows_are_those_that_ddp_tells(window: int) -> None:
    """Rank 0's, step by step: by no more than 0.3 ms in most steps, and by 3 % or 0.3 ms in the mean."""
    told = ddp()
    name = ("forward", "backward_compute", "backward_comm", "overlap")[window]
    theirs = np.array([step[window] for step in told["windows_ns"]])[2:]
    steps = facts_of("rebuilt").steps.filter(pl.col("rank") == 0, pl.col("step").is_between(2, STEPS - 2))
    ours = steps[f"c10d_{name}_ns"].to_numpy()
    assert len(ours) == len(theirs) == STEPS - 3
    assert np.quantile(np.abs(ours - theirs), 0.9) < 300_000
    assert ours.mean() == pytest.approx(theirs.mean(), rel=0.03, abs=300_000)
    table = statistics(load(FIXTURES / "rebuilt", steps=(0, STEPS - 1))).per_rank.filter(rank=0, window=name)
    assert table["mean_ns"].item() == pytest.approx(ours.mean())


@pytest.mark.parametrize("rank", [0, KILLED_RANK])
@pytest.mark.parametrize("table", TABLES)
def test_parts_and_spool_of_a_killed_run_are_merged(rank: int, table: str) -> None:
    """Row for row what the files hold, the spool's only where there is no part of its number."""
    folder = rank_folders("killed")[rank]
    parts = {int(path.stem.rsplit("-", 1)[1]): path for path in folder.glob(f"{table}-*.parquet")}
    spools = {int(path.stem.rsplit("-", 1)[1]): read_spool(path) for path in folder.glob("live-*.spool")}
    assert parts, "the recording ran long enough for a part"
    assert rank == 0 or set(spools) - set(parts), "and was cut off before its end"
    key = {"steps": "forward_start_ns", "collectives": "seq"}[table]
    expected = [row for path in parts.values() for row in pl.read_parquet(path, columns=[key])[key].to_list()]
    for number in set(spools) - set(parts):
        expected += spools[number].columns(table)[key][0].tolist()
    rows = opened("killed").steps() if table == "steps" else opened("killed").collectives()
    assert sorted(rows.filter(rank=rank).select(key).collect()[key]) == sorted(expected)


def test_the_killed_rank_is_read_to_its_last_event() -> None:
    """It was killed between the forward and the backward of its step 100."""
    run = opened("killed")
    assert not run.metadata[KILLED_RANK]["closed"]
    rows = run.steps().filter(rank=KILLED_RANK).collect()
    assert rows["step"].to_list() == list(range(KILLED_IN_STEP + 1))
    assert rows["forward_end_ns"].null_count() == 0
    assert rows["optimizer_end_ns"].is_null().to_list() == [False] * KILLED_IN_STEP + [True]
    assert rows["compute_end_ns"].is_null().to_list() == [False] * KILLED_IN_STEP + [True]
    collectives = run.collectives().filter(rank=KILLED_RANK).sort("seq").collect()
    assert collectives["seq"].to_list() == list(range(collectives.height))
    assert collectives["step"].max() == KILLED_IN_STEP - 1
    assert collectives["op"].to_list()[-2:] == ["broadcast"] * 2, "the buffers, in the forward of step 100"
    assert collectives["end_ns"].null_count() == 0


def test_the_survivor_is_read_to_its_last_event() -> None:
    """It launched the buckets of the step in which the other was killed; they were never reduced."""
    rows = opened("killed").steps().filter(rank=0).collect()
    assert rows["step"].to_list() == list(range(KILLED_IN_STEP + 1))
    assert rows.row(-1, named=True)["backward_end_ns"] is None
    buckets = opened("killed").collectives().filter(rank=0, step=KILLED_IN_STEP).collect()
    assert buckets["bucket"].to_list() == list(range(len(buckets)))


def test_what_is_missing_of_a_killed_run_is_said() -> None:
    known = facts_of("killed")
    told = {problem.kind: problem for problem in known.problems}
    assert set(told) == {"not_closed", "seq_gap"}
    assert KILLED_RANK in told["not_closed"].ranks
    assert told["seq_gap"].ranks == (KILLED_RANK,)
    assert known.gaps.filter(rank=KILLED_RANK)["collectives_missing"].item() == known.steps["buckets"].max()
    assert set(known.steps.filter(~pl.col("complete"))["step"]) == {KILLED_IN_STEP}


def test_attempts_of_one_job_are_runs_of_their_own() -> None:
    second, first = find_runs(FIXTURES / "attempts")
    assert (first.job_id, second.job_id) == ("attempts", "attempts")
    assert (first.restart, second.restart) == (0, 1)
    assert (first.world_size, second.world_size) == (2, 2)
    assert first.id != second.id
    assert first.start_ns < second.start_ns


def test_attempts_are_not_merged() -> None:
    """The first ended in step 60, when rank 1 died before its forward; the second ran 80 steps."""
    second, first = (load(FIXTURES / "attempts", run=info.id) for info in find_runs(FIXTURES / "attempts"))
    for run, whole in ((first, 60), (second, 80)):
        steps = facts(run).steps
        assert set(steps["step"]) - {whole} == set(range(whole))
        assert steps.filter(pl.col("step") < whole).height == 2 * whole
        assert steps.filter(pl.col("step") < whole)["complete"].all()
        assert set(run.collectives().select(pl.col("step").max()).collect()["step"]) <= {whole - 1, whole}
    assert [problem.kind for problem in load(FIXTURES / "attempts").problems] == ["several_runs"]
