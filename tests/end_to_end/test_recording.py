"""What is in the log is what happened: real trainings, recorded, compared with what they know of themselves."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
import torch
from tests.end_to_end.recorded import Recorded

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

Launch = Callable[..., "Outcome"]
ReadRuns = Callable[[Path], "list[RunLog]"]

STEPS = 12
CLOCK_NS = 2_000_000
"""How far the wall clock, read by the scripts, and the recorder's anchored one may differ."""
PROCESS_GROUP_HOOKS = hasattr(torch.distributed.ProcessGroup, "register_post_hook")


@pytest.fixture(scope="module")
def plain(launch: Launch, read_runs: ReadRuns, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    logs = tmp_path_factory.mktemp("logs")
    return Recorded(launch("plain", log_dir=logs), read_runs(logs))


@pytest.fixture(scope="module")
def lives(launch: Launch, read_runs: ReadRuns, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    logs = tmp_path_factory.mktemp("logs")
    return Recorded(launch("lives", ranks=3, log_dir=logs), read_runs(logs))


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def log(plain: Recorded, rank: int) -> RankLog:
    """The log of one rank of the plain training."""
    return plain.run_of("Plain").ranks[rank]


def differences(frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """Each column minus the one before it, in ns."""
    return frame.select(
        (pl.col(after) - pl.col(before)).alias(f"{before} to {after}") for before, after in itertools.pairwise(columns)
    )


def least(series: pl.Series) -> int:
    return int(min(series.to_list()))


def assert_in_order(frame: pl.DataFrame, *columns: str) -> None:
    """No value is null and each is at least the one before it."""
    assert frame.height > 0
    assert sum(frame[column].null_count() for column in columns) == 0
    for series in differences(frame, *columns):
        assert least(series) >= 0, series


def test_one_run_of_both_ranks(plain: Recorded) -> None:
    [run] = plain.runs
    assert sorted(run.ranks) == [0, 1]
    for log in run.ranks.values():
        assert log.metadata["closed"]
        assert sorted(path.name for path in log.path.iterdir()) == [
            "collectives-000000.parquet",
            "steps-000000.parquet",
        ]


def test_the_user_is_told_where_the_log_is(plain: Recorded) -> None:
    [line] = plain.outcome.said
    assert "recording 2 ranks" in line
    assert str(plain.runs[0].path) in line
    assert f"ddpan summarize {plain.runs[0].path.parent}" in line


def test_every_step_has_its_row(log: RankLog, rank: int) -> None:
    assert log.steps["step"].to_list() == list(range(STEPS))
    assert log.steps["micro_batch"].to_list() == [0] * STEPS
    assert log.steps["synced"].all()
    assert set(log.steps["module"]) == {0}
    assert set(log.steps["rank"]) == set(log.collectives["rank"]) == {rank}


def test_phases_are_in_order(log: RankLog) -> None:
    phases = ("forward", "compute", "backward", "optimizer")
    assert_in_order(log.steps, "forward_start_ns", *(f"{phase}_end_ns" for phase in phases))
    assert_in_order(log.steps, "backward_end_ns", "optimizer_start_ns", "optimizer_end_ns")


def test_phases_lie_where_the_script_saw_them(plain: Recorded, log: RankLog, rank: int) -> None:
    names = ["load", "loaded", "forward", "loss", "reduced", "stepped"]
    moments = pl.DataFrame(plain.outcome.facts(rank)["moments"], schema=names, orient="row")
    both = pl.concat([log.steps, moments], how="horizontal")
    bounds = {
        ("forward", "loss"): ("forward_start_ns", "forward_end_ns"),
        ("loss", "reduced"): ("compute_end_ns", "backward_end_ns"),
        ("reduced", "stepped"): ("optimizer_start_ns", "optimizer_end_ns"),
    }
    for (begin, end), (first, last) in bounds.items():
        assert least(both[first] - both[begin]) > -CLOCK_NS
        assert least(both[end] - both[last]) > -CLOCK_NS


def test_forward_includes_the_sleep_in_it(log: RankLog) -> None:
    assert least(log.steps["forward_end_ns"] - log.steps["forward_start_ns"]) >= 4_000_000


def test_data_wait(plain: Recorded, log: RankLog, rank: int) -> None:
    """Four samples of 2 ms each, and no more than the script itself waited."""
    moments = plain.outcome.facts(rank)["moments"]
    for wait_ns, times in zip(log.steps["data_wait_ns"], moments, strict=True):
        assert 8_000_000 <= wait_ns <= times[1] - times[0] + CLOCK_NS


def sizes(told: str) -> list[int]:
    return [int(size) for size in told.split(",")]


def test_buckets_are_those_of_ddp(plain: Recorded, log: RankLog, rank: int) -> None:
    """Bytes and order as DDP's own logging data has them; the first step in the first buckets, then the rebuilt."""
    facts = plain.outcome.facts(rank)
    first, rebuilt = (sizes(facts["logger"][kind]) for kind in ("bucket_sizes", "rebuilt_bucket_sizes"))
    assert len(rebuilt) > 1
    assert first != rebuilt
    for step in range(STEPS):
        rows = log.buckets.filter(step=step).sort("seq")
        assert rows["bytes"].to_list() == (first if step == 0 else rebuilt)
        assert rows["bucket"].to_list() == list(range(rows.height))
        assert set(rows["layout"]) == {min(step, 1)}
        assert rows["bytes"].sum() == facts["parameter_bytes"]
        assert set(rows["op"]) == {"all_reduce"}
        assert set(rows["module"]) == {0}


def test_buckets_are_launched_in_order_and_end(log: RankLog) -> None:
    rows = log.buckets.join(log.steps, on=["module", "step"], suffix="_of_step")
    assert_in_order(rows, "forward_end_ns", "launch_ns", "end_ns")
    for _, of_step in rows.sort("bucket").group_by("step"):
        assert of_step["launch_ns"].is_sorted()
    assert_in_order(rows, "end_ns", "backward_end_ns")
    last = rows.group_by("step").agg(pl.col("launch_ns").max(), pl.col("compute_end_ns").first())
    assert_in_order(last, "launch_ns", "compute_end_ns")


def test_ready_time_of_buckets(log: RankLog) -> None:
    """Null only in the step after the rebuild, when the reducer does not tell which parameters are in which bucket."""
    rows = log.buckets.join(log.steps, on=["module", "step"])
    assert set(rows.filter(pl.col("ready_ns").is_null())["step"]) <= {1}
    known = rows.filter(pl.col("ready_ns").is_not_null())
    assert set(known["step"]) >= {0, *range(2, STEPS)}
    assert_in_order(known, "forward_end_ns", "ready_ns", "launch_ns")


def test_start_on_the_device_is_unknown_to_gloo(log: RankLog) -> None:
    assert log.collectives["start_ns"].null_count() == log.collectives.height


def test_no_rank_ends_before_the_last_has_launched(plain: Recorded) -> None:
    """Both ranks are on one host, so their clocks agree up to the anchors' uncertainty."""
    logs = plain.run_of("Plain").ranks
    joined = logs[0].buckets.join(logs[1].buckets, on=["group", "seq"], suffix="_1")
    assert joined.height == logs[0].buckets.height
    assert_in_order(joined.with_columns(pl.col("end_ns_1") + CLOCK_NS), "launch_ns", "end_ns_1")
    assert_in_order(joined.with_columns(pl.col("end_ns") + CLOCK_NS), "launch_ns_1", "end_ns")


def test_sequence_numbers_join_the_ranks(plain: Recorded) -> None:
    what = ["group", "seq", "op", "module", "step", "bucket", "layout", "bytes"]
    first, second = (plain.run_of("Plain").ranks[rank].collectives.sort("group", "seq") for rank in (0, 1))
    assert first["seq"].to_list() == list(range(first.height))
    assert first.select(what).equals(second.select(what))


def test_broadcast_of_buffers_is_no_bucket(log: RankLog) -> None:
    """In each forward of a trained model the running mean and variance, and the count of batches, 520 bytes."""
    others = log.collectives.filter(pl.col("bucket").is_null())
    assert others.select(pl.col("module", "step", "layout").is_null().all()).row(0) == (True, True, True)
    for row in log.steps.filter(pl.col("step") >= 2).iter_rows(named=True):
        inside = others.filter(pl.col("launch_ns").is_between(row["forward_start_ns"], row["forward_end_ns"]))
        assert set(inside["op"]) == {"broadcast"}
        assert inside["bytes"].sum() == 64 * 4 * 2 + 8


def test_metadata_says_who_recorded(log: RankLog, rank: int) -> None:
    metadata = log.metadata
    assert metadata["run"] == log.path.parent.name
    assert (metadata["rank"], metadata["local_rank"], metadata["world_size"]) == (rank, rank, 2)
    assert (metadata["host"], metadata["device"], metadata["backend"]) == (socket.gethostname(), "cpu", "gloo")
    assert metadata["pid"] != os.getpid()
    assert metadata["versions"]["torch"] == torch.__version__
    assert set(metadata["versions"]) == {"ddpan", "torch", "python"}
    assert metadata["tap"] == ("process_group_hooks" if PROCESS_GROUP_HOOKS else "reducer_group")
    assert metadata["job"]["restart"] == 0
    assert metadata["job"]["id"], "torchrun --standalone gives its runs an id"


def test_metadata_says_what_was_recorded(plain: Recorded, log: RankLog, rank: int) -> None:
    facts = plain.outcome.facts(rank)
    metadata = log.metadata
    assert metadata["groups"] == {"0": {"name": "0", "ranks": [0, 1], "backend": "gloo"}}
    module = dict(metadata["modules"]["0"])
    assert module.pop("bucket_cap_mb") == pytest.approx(facts["logger"]["bucket_cap_bytes"] / 2**20)
    expected = {
        "name": "Plain",
        "group": 0,
        "parameters": len(facts["names"]),
        "parameter_bytes": facts["parameter_bytes"],
        "find_unused_parameters": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "comm_hook": None,
    }
    assert expected.items() <= module.items()
    assert metadata["counters"]["errors"] == metadata["counters"]["late_ends"] == 0
    assert set(metadata["counters"]["dropped"].values()) == {0}
    clock = metadata["clock"]
    assert abs(clock["anchor_epoch_ns"] - facts["moments"][0][0]) < 60e9
    assert clock["uncertainty_ns"] < 1_000_000


def test_metadata_names_the_parameters_of_each_bucket(plain: Recorded, log: RankLog, rank: int) -> None:
    facts = plain.outcome.facts(rank)
    names, told = facts["names"], facts["logger"]
    rebuilt = [
        [names[int(i)] for i in bucket.split()] for bucket in told["rebuilt_per_bucket_param_indices"].split(",")
    ]
    layouts = log.metadata["layouts"]["0"]
    assert set(layouts) == {"0", "1"}
    assert layouts["1"] == [
        {"bytes": size, "parameters": parameters}
        for size, parameters in zip(sizes(told["rebuilt_bucket_sizes"]), rebuilt, strict=True)
    ]
    assert [bucket["bytes"] for bucket in layouts["0"]] == sizes(told["bucket_sizes"])
    assert sorted(layouts["0"][0]["parameters"]) == sorted(names)


def test_each_process_group_is_a_run_of_its_own(lives: Recorded) -> None:
    assert len({run.path.name for run in lives.runs}) == 4
    names = [run.ranks[0].metadata["modules"]["0"]["name"] for run in lives.runs]
    assert names == ["Accumulating", "Evaluated", "Collecting", "Interleaved"]
    for run in lives.runs:
        assert sorted(run.ranks) == [0, 1, 2]
        assert all(log.metadata["closed"] and log.metadata["counters"]["errors"] == 0 for log in run.ranks.values())
        assert len({log.metadata["job"]["id"] for log in run.ranks.values()}) == 1


def test_nothing_went_wrong(lives: Recorded) -> None:
    assert all("warning" not in line for line in lives.outcome.said)


def test_gradient_accumulation(lives: Recorded) -> None:
    """Each step is three forwards that reduce nothing, then one that does and is followed by the optimizer."""
    for log in lives.run_of("Accumulating").ranks.values():
        rows = log.steps
        assert rows["step"].to_list() == [0] * 4 + [1] * 4 + [2] * 4
        assert rows["micro_batch"].to_list() == [0, 1, 2, 3] * 3
        assert rows["synced"].to_list() == [False, False, False, True] * 3
        after_forward = ("compute_end_ns", "backward_end_ns", "optimizer_start_ns", "optimizer_end_ns")
        assert all(rows.filter(~pl.col("synced"))[column].is_null().all() for column in after_forward)
        assert all(rows.filter("synced")[column].is_not_null().all() for column in after_forward)
        assert log.buckets["step"].to_list() == [0, 1, 2]
        within = log.buckets.join(rows.filter("synced"), on="step")
        assert_in_order(within, "forward_end_ns", "launch_ns", "backward_end_ns")


def test_evaluation_is_not_recorded(lives: Recorded) -> None:
    for log in lives.run_of("Evaluated").ranks.values():
        assert log.steps["step"].to_list() == [0, 1, 2, 3]
        assert log.steps["micro_batch"].to_list() == [0] * 4
        assert log.buckets["step"].to_list() == [0, 1, 2, 3]
        assert log.steps["optimizer_end_ns"].null_count() == 0


def test_buckets_belong_to_the_module_whose_backward_it_is(lives: Recorded) -> None:
    """A forward that is never followed by a backward must not claim the buckets of another module's."""
    for log in lives.run_of("Interleaved").ranks.values():
        seen = log.buckets.sort("seq").select("module", "step")
        assert list(seen.iter_rows()) == [(1, 0), (1, 1), (1, 2), (0, 0)]
        reduced = log.steps.filter(pl.col("backward_end_ns").is_not_null()).sort("backward_end_ns")
        assert list(reduced.select("module", "step").iter_rows()) == [(1, 0), (1, 1), (1, 2), (0, 0)]


def own_collectives(log: RankLog) -> list[tuple[int, str, int]]:
    """Group, op and bytes of what is neither a bucket nor issued by DDP: its constructor, its rebuild of buckets."""
    rows = log.collectives.filter(pl.col("bucket").is_null())
    inside = pl.lit(False)
    for step in log.steps.iter_rows(named=True):
        inside |= pl.col("launch_ns").is_between(step["forward_start_ns"], step["forward_end_ns"])
    first = log.steps["forward_start_ns"].min()
    rows = rows.filter(~inside, pl.col("launch_ns") > first).sort("launch_ns")
    return list(rows.select("group", "op", "bytes").iter_rows())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_collectives_of_the_user(lives: Recorded, rank: int) -> None:
    cycle = [(0, "all_reduce", 40), (0, "broadcast", 24)]
    cycle += [(1, "all_gather", 20)] if rank < 2 else []
    cycle += [(0, "all_reduce", 80)]
    cycle += [(2, "all_reduce", 28)] if rank == 0 else []
    last = [(2, "all_reduce", 28)] if rank == 0 else []
    log = lives.run_of("Collecting").ranks[rank]
    seen = [row for row in own_collectives(log) if row[1] not in ("send", "recv")]
    assert seen == cycle * 4 + [*last, (0, "barrier", 0)]
    rows = log.collectives.filter(~pl.col("op").is_in(["send", "recv"]))
    assert_in_order(rows, "launch_ns", "end_ns")


def test_groups_have_the_same_number_on_all_their_ranks(lives: Recorded) -> None:
    groups = {rank: log.metadata["groups"] for rank, log in lives.run_of("Collecting").ranks.items()}
    assert {number: group["ranks"] for number, group in groups[0].items()} == {"0": [0, 1, 2], "1": [0, 1], "2": [0]}
    assert groups[1]["1"] == groups[0]["1"]
    assert groups[2]["0"] == groups[0]["0"]
    assert "1" not in groups[2]


def test_sequence_numbers_join_the_ranks_of_every_group(lives: Recorded) -> None:
    """Sends and receives concern two ranks of the group, and must not shift the numbers of the third."""
    what = ["group", "seq", "op", "step", "bucket", "bytes"]
    logs = lives.run_of("Collecting").ranks
    collectives = {
        rank: log.collectives.filter(~pl.col("op").is_in(["send", "recv"])).select(what).sort("group", "seq")
        for rank, log in logs.items()
    }
    in_all, in_pair = pl.col("group") == 0, pl.col("group") == 1
    assert collectives[0].filter(in_all).equals(collectives[1].filter(in_all))
    assert collectives[0].filter(in_all).equals(collectives[2].filter(in_all))
    assert collectives[0].filter(in_pair).equals(collectives[1].filter(in_pair))
    assert collectives[0].filter(in_pair)["seq"].to_list() == [0, 1, 2, 3]
