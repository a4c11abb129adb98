"""The collector under frameworks that people use, with scripts such as their tutorials show, and under a restart."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import polars as pl
import pytest
import torch

from .conftest import SCRIPTS, environment, run_process
from .mode_results import as_log, tell
from .write_modes_table import PAGE, UNCHANGED, rows_of_table

if TYPE_CHECKING:
    from .conftest import Outcome, RankLog, RunLog

ReadRuns = Callable[[Path], "list[RunLog]"]

RANKS: Final = 2
STEPS: Final = 12
"""96 samples, in batches of 4 on two ranks, two of them in a step, twice."""
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


@dataclass(frozen=True)
class Framework:
    """A framework and its tutorial.

    Attributes:
        name: for the table in the documentation.
        script: the tutorial; of all of them the training has the same shape.
        launcher: what is put before the script.
    """

    name: str
    script: str
    launcher: tuple[str, ...] = TORCHRUN


FRAMEWORKS: Final = (
    Framework("Hugging Face accelerate", "accelerate_tutorial"),
    Framework("Lightning Fabric", "fabric_tutorial", launcher=()),
    Framework("Lightning Trainer", "trainer_tutorial", launcher=()),
)
RESTART: Final = "torchrun --max-restarts"
RESTARTING: Final = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job-7")
FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A store for each attempt: in the agent's, gloo may find the addresses of the attempt before, and fail."""
MOMENTS: Final = (
    "forward_start_ns",
    "forward_end_ns",
    "compute_end_ns",
    "backward_end_ns",
    "optimizer_start_ns",
    "optimizer_end_ns",
)
SECONDS: Final = 200

pytestmark = pytest.mark.timeout(3 * SECONDS)


@dataclass(frozen=True)
class Pair:
    """A training without the collector and the same one with it."""

    off: Outcome
    on: Outcome
    runs: list[RunLog]

    @property
    def said(self) -> list[str]:
        """What the collector said, apart from where it records."""
        return [line for line in self.on.said if "recording" not in line]

    def is_unchanged(self) -> bool:
        """Whether the weights of every rank are the same to the bit."""
        return all(
            same_weights(*(torch.load(outcome.out / f"weights-{rank}.pt") for outcome in (self.off, self.on)))
            for rank in range(RANKS)
        )


def same_weights(off: dict[str, torch.Tensor], on: dict[str, torch.Tensor]) -> bool:
    """Whether two states of a model are the same to the bit."""
    return off.keys() == on.keys() != set() and all(torch.equal(off[name], on[name]) for name in off)


def run_script(launcher: tuple[str, ...], script: str, *, log_dir: Path | None, out: Path) -> Outcome:
    """Run a script; one that starts its own processes gets a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = FRESH_STORE if launcher else {"MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, *launcher, str(SCRIPTS / f"{script}.py"), str(out)]
    outcome = run_process(command, env=environment(log_dir, own), out=out, cwd=out, timeout=SECONDS)
    assert outcome.returncode == 0, outcome.stderr
    return outcome


Train = Callable[[tuple[str, ...], str], Pair]


@pytest.fixture(scope="module")
def train(read_runs: ReadRuns, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains twice, without the collector and with it."""

    def both(launcher: tuple[str, ...], script: str) -> Pair:
        off, on, logs = (tmp_path_factory.mktemp(name) for name in ("off", "on", "logs"))
        return Pair(
            off=run_script(launcher, script, log_dir=None, out=off),
            on=run_script(launcher, script, log_dir=logs, out=on),
            runs=read_runs(logs),
        )

    return both


@pytest.fixture(scope="module", params=FRAMEWORKS, ids=lambda framework: framework.name)
def pair(request: pytest.FixtureRequest, train: Train) -> Pair:
    """The tutorial of each framework."""
    framework: Framework = request.param
    return train(framework.launcher, framework.script)


def test_training_is_unchanged(pair: Pair) -> None:
    assert pair.is_unchanged()


def test_nothing_is_said_or_lost(pair: Pair) -> None:
    assert pair.said == []
    for run in pair.runs:
        for log in run.ranks.values():
            counters = log.metadata["counters"]
            assert counters["errors"] == counters["late_ends"] == sum(counters["dropped"].values()) == 0
            assert log.metadata["closed"]


def test_rows_are_what_happened(pair: Pair, record_property: Callable[[str, object], None]) -> None:
    """Steps of two micro-batches, of which the last is reduced and followed by the optimizer."""
    [run] = pair.runs
    tell((as_log(log, {}) for log in run.ranks.values()), record_property)
    assert sorted(run.ranks) == list(range(RANKS))
    for log in run.ranks.values():
        check_steps(log)
        steps = {row["step"]: row for row in log.steps.filter("synced").to_dicts()}
        buckets = log.buckets.to_dicts()
        assert {row["step"] for row in buckets} == set(range(STEPS))
        for row in buckets:
            step = steps[row["step"]]
            assert step["forward_end_ns"] <= row["launch_ns"] <= row["end_ns"]


def check_steps(log: RankLog) -> None:
    """Numbers and moments of the steps."""
    rows = log.steps.to_dicts()
    assert [(row["step"], row["micro_batch"], row["synced"]) for row in rows] == [
        (step, micro_batch, micro_batch == 1) for step in range(STEPS) for micro_batch in (0, 1)
    ]
    for row in rows:
        assert row["data_wait_ns"] > 0
        if row["synced"]:
            moments = [row[name] for name in MOMENTS]
            assert None not in moments
            assert moments == sorted(moments)
        else:
            assert row["backward_end_ns"] is row["optimizer_end_ns"] is None


@pytest.fixture(scope="module", params=[RESTART])
def restarted(train: Train) -> Pair:
    """A training in which rank 1 dies after three of six steps and torchrun starts all ranks again."""
    options = (*RESTARTING, "--nnodes", "1", "--max-restarts", "1", "--nproc-per-node", str(RANKS))
    return train(("-m", "torch.distributed.run", *options), "restarting")


def test_a_restarted_training_is_unchanged(restarted: Pair) -> None:
    assert restarted.is_unchanged()
    assert restarted.said == []


def test_a_restart_is_a_run_of_its_own_in_the_same_job(
    restarted: Pair, record_property: Callable[[str, object], None]
) -> None:
    first, second = restarted.runs
    logs = [log for run in restarted.runs for log in run.ranks.values()]
    tell((as_log(log, {}) for log in logs), record_property)
    assert {log.metadata["job"]["id"] for log in logs} == {"job-7"}
    for run, restart in ((first, 0), (second, 1)):
        assert {log.metadata["job"]["restart"] for log in run.ranks.values()} == {restart}
        assert sorted(run.ranks) == list(range(RANKS))
        for log in run.ranks.values():
            # Rank 0 may have begun another step before it was told that rank 1 is gone.
            steps, buckets = log.steps.filter(pl.col("step") < 3), log.buckets.filter(pl.col("step") < 3)
            assert steps["step"].to_list() == [0, 1, 2]
            assert set(buckets["step"]) == {0, 1, 2}
            assert all(steps[name].null_count() == 0 for name in MOMENTS)
            assert buckets["end_ns"].null_count() == 0
    assert first.ranks[1].steps.height == 3
    assert not first.ranks[1].metadata["closed"]
    assert all(log.metadata["closed"] and log.steps.height == 3 for log in second.ranks.values())


def test_documentation_has_every_framework() -> None:
    rows = rows_of_table(PAGE.read_text())
    for name in (*(framework.name for framework in FRAMEWORKS), RESTART):
        assert rows[name], name
        assert all(result.startswith(UNCHANGED) for result in rows[name])
