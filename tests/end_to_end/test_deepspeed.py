"""DeepSpeed with ZeRO 0 to 3 on gloo: what is recorded, that it changes nothing, and who is named.

The parity with DeepSpeed's own comms logger is tested in the same run.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from ddpan.analysis import Run, load, overlap, stragglers

from .conftest import SCRIPTS, environment, run_process

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

Launch = Callable[..., "Outcome"]

STEPS = 2
# As in scripts/zero.py: stage and micro-batches of each configuration, in the order of the modules.
CONFIGURATIONS = [(0, 1), (0, 2), (1, 2), (1, 1), (2, 2), (2, 1), (3, 2), (3, 1)]
LAYER_BYTES = 4 * 32 * 33
MODEL_BYTES = 6 * LAYER_BYTES
SLOW_STEPS = 30
SLOW_RANK, DELAY_NS = 2, 20_000_000
OPS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
"""Names that DeepSpeed has for operations, where they are others than ours."""


class Recorded:
    """The trainings with the collector and the comms logger on, and without either."""

    def __init__(self, outcome: Outcome, plain: Outcome, run: RunLog) -> None:
        self.outcome = outcome
        self.plain = plain
        self.run = run


@pytest.fixture(scope="module")
def recorded(
    launch: Launch, read_runs: Callable[[Path], list[RunLog]], tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    logs = tmp_path_factory.mktemp("logs")
    plain = launch("zero", "all", str(STEPS))
    outcome = launch("zero", "all", str(STEPS), log_dir=logs, env={"COMMS_LOGGER": "1"})
    [run] = read_runs(logs)
    return Recorded(outcome, plain, run)


@pytest.fixture(params=[0, 1])
def log(recorded: Recorded, request: pytest.FixtureRequest) -> RankLog:
    return recorded.run.ranks[request.param]


@pytest.fixture(scope="module")
def slow(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """ZeRO 1, 2 and 3 on four ranks, with a delay in the backward of one of them."""
    logs = tmp_path_factory.mktemp("logs")
    launch("zero", "slow", str(SLOW_STEPS), ranks=4, log_dir=logs)
    return load(logs)


def test_weights_are_the_same_to_the_bit(recorded: Recorded) -> None:
    for rank in recorded.run.ranks:
        assert recorded.outcome.facts(rank)["hashes"] == recorded.plain.facts(rank)["hashes"]
    assert len(recorded.plain.facts(0)["hashes"]) == len(CONFIGURATIONS)


def test_each_engine_is_a_module(log: RankLog) -> None:
    modules = log.metadata["modules"].values()
    assert [one["zero_stage"] for one in modules] == [stage for stage, _ in CONFIGURATIONS]
    assert {one["kind"] for one in modules} == {"deepspeed"}
    assert {one["parameter_bytes"] for one in modules} == {MODEL_BYTES}
    assert log.metadata["counters"]["errors"] == 0


def test_steps_end_at_the_accumulation_boundary(log: RankLog) -> None:
    for module, (_, micro_batches) in enumerate(CONFIGURATIONS):
        rows = log.steps.filter(module=module)
        expected = [(s, m, m == micro_batches - 1) for s in range(STEPS) for m in range(micro_batches)]
        assert rows.select("step", "micro_batch", "synced").rows() == expected


def test_phases_are_in_order(log: RankLog) -> None:
    names = ("forward_start", "forward_end", "compute_end", "backward_end", "optimizer_start", "optimizer_end")
    for row in log.steps.filter("synced").iter_rows(named=True):
        for before, after in pairwise(f"{name}_ns" for name in names):
            assert row[before] <= row[after], (before, after)


def test_buckets_reduce_every_gradient_once(log: RankLog) -> None:
    for module, (stage, _) in enumerate(CONFIGURATIONS):
        for step in range(STEPS):
            rows = log.buckets.filter(module=module, step=step)
            assert rows["bucket"].to_list() == list(range(rows.height))
            assert rows["bytes"].sum() == MODEL_BYTES
            assert set(rows["op"]) == {"reduce_scatter" if stage == 3 else "all_reduce"}
            [layout] = set(rows["layout"])
            buckets = log.metadata["layouts"][str(module)][str(layout)]
            assert rows["bytes"].to_list() == [bucket["bytes"] for bucket in buckets]
        assert log.buckets.filter(module=module, step=0).height > 1 or stage == 0


def test_each_bucket_names_its_parameters(log: RankLog) -> None:
    """Each parameter is in one bucket of each layout; ZeRO 2 and 3 fill them in the order of the backward."""
    every = [f"linear.{layer}.{name}" for layer in range(6) for name in ("bias", "weight")]
    for module, (stage, _) in enumerate(CONFIGURATIONS):
        for buckets in log.metadata["layouts"][str(module)].values():
            held = [sorted(bucket["parameters"]) for bucket in buckets]
            assert sorted(name for names in held for name in names) == every
            sizes = [sum(4 * 32 * (32 if name.endswith("weight") else 1) for name in names) for names in held]
            assert [bucket["bytes"] for bucket in buckets] == sizes
            if stage >= 2:
                assert held == [every[8:], every[4:8], every[:4]]


def test_gathers_and_other_collectives_are_rows(log: RankLog) -> None:
    others = log.collectives.filter(pl.col("bucket").is_null())
    assert {"all_gather", "broadcast", "reduce_scatter"} <= set(others["op"])
    assert log.collectives["end_ns"].null_count() == 0


def logged(outcome: Outcome) -> dict[tuple[str, int], tuple[int, list[float]]]:
    """Count and latencies in milliseconds by operation and message size, as rank 0's comms logger has them."""
    return {
        (OPS.get(op, op), int(size)): (count, latencies)
        for op, sizes in outcome.facts(0)["logger"].items()
        for size, (count, latencies) in sizes.items()
    }


def test_counts_are_those_of_the_comms_logger(recorded: Recorded) -> None:
    ours = recorded.run.ranks[0].collectives.group_by("op", "bytes").len().rows()
    assert {(op, size): count for op, size, count in ours} == {k: n for k, (n, _) in logged(recorded.outcome).items()}


def test_latencies_of_the_comms_logger_are_cumulative(recorded: Recorded) -> None:
    """Why its totals are not to be believed on a CPU: its timer of an operation is read without a reset.

    So each reading holds all earlier ones of the operation, of whatever size, and the last one is the true total.
    """
    sizes = [latencies for (op, _), (_, latencies) in logged(recorded.outcome).items() if op == "all_reduce"]
    assert all(before < after for latencies in sizes for before, after in pairwise(latencies))
    readings = sorted(reading for latencies in sizes for reading in latencies)
    rows = recorded.run.ranks[0].collectives.filter(op="all_reduce")
    assert len(readings) == rows.height
    spent_ms = float((rows["end_ns"] - rows["launch_ns"]).sum()) / 1e6
    assert readings[-1] > 0.5 * spent_ms
    assert sum(readings) > 3 * readings[-1]


@pytest.mark.parametrize("module", [0, 1, 2], ids=["zero1", "zero2", "zero3"])
def test_the_late_rank_and_its_backward_are_named(slow: Run, module: int) -> None:
    [verdict] = [one for one in stragglers(slow).named if one.module == module]
    assert (verdict.kind, verdict.rank, verdict.cause) == ("persistent", SLOW_RANK, "backward")
    assert verdict.delay_ns is not None
    assert 0.5 * DELAY_NS < verdict.delay_ns < 2 * DELAY_NS


@pytest.mark.parametrize("module", [1, 2], ids=["zero2", "zero3"])
def test_the_first_late_bucket_holds_the_slow_layer(slow: Run, module: int) -> None:
    """Buckets of two layers: the delay lies behind the last three layers, so in the second of three buckets."""
    [verdict] = [one for one in stragglers(slow).named if one.module == module]
    assert verdict.first_late_bucket == 1
    held = {f"linear.{layer}.{name}" for layer in (2, 3) for name in ("bias", "weight")}
    assert set(verdict.first_late_parameters) == held


def test_what_blocks_the_backward_is_exposed(slow: Run) -> None:
    """On a CPU, ZeRO waits for each bucket before it goes on, overlap_comm or not: nothing is hidden."""
    overall: list[dict[str, Any]] = overlap(slow).overall.to_dicts()
    assert len(overall) >= 3
    for row in overall:
        assert row["comm_ns"] > 0
        assert row["ratio"] < 0.1


def test_deepspeed_launcher_records_too(
    read_runs: Callable[[Path], list[RunLog]], tmp_path: Path, recorded: Recorded
) -> None:
    """Started by ``deepspeed`` in place of torchrun, a training leaves the same rows and weights."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--no_local_rank"]
    command = [*launcher, "--master_port", str(port), str(SCRIPTS / "zero.py"), str(out), "all", str(STEPS)]
    env = environment(logs, {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    outcome = run_process(command, env=env, out=out, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    [run] = read_runs(logs)
    assert sorted(run.ranks) == [0, 1]
    for rank, log in run.ranks.items():
        assert outcome.facts(rank)["hashes"] == recorded.plain.facts(rank)["hashes"]
        shape = ("step", "module", "bucket", "layout", "op", "group", "seq", "bytes")
        assert log.collectives.select(shape).equals(recorded.run.ranks[rank].collectives.select(shape))
