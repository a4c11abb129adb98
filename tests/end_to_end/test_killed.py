"""A training ends in the middle of a step, in one way or another: the log of every rank is read to its last event."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from click.testing import CliRunner

from ddpan.analysis import load
from ddpan.analysis.cli import main

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

BEFORE_THE_END = 150
SEGMENT = 256


def finished(out: Path, rank: int) -> int:
    """Steps that the script of a rank knows to be over."""
    counted = out / f"finished-{rank}"
    return int.from_bytes(counted.read_bytes(), "little") if counted.exists() else 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def well_under_way(out: Path) -> bool:
    return all(finished(out, rank) > BEFORE_THE_END for rank in (0, 1))


@dataclass(frozen=True)
class FromOutside:
    """Ends a training that would go on."""

    logs: Path
    read_runs: Callable[[Path], list[RunLog]]

    def interrupt(self, torchrun: subprocess.Popen[str], out: Path) -> None:
        """What a terminal does on Ctrl-C."""
        wait_until(lambda: well_under_way(out))
        os.killpg(torchrun.pid, signal.SIGINT)

    def terminate(self, torchrun: subprocess.Popen[str], out: Path) -> None:
        """What a scheduler does when the time is over."""
        wait_until(lambda: well_under_way(out))
        torchrun.send_signal(signal.SIGTERM)

    def hang(self, torchrun: subprocess.Popen[str], out: Path) -> None:
        """One rank takes no more part, the other hangs in its collective; then the first is killed, and the other."""
        wait_until(lambda: well_under_way(out))
        [run] = self.read_runs(self.logs)
        hanging, killed = (run.ranks[rank].metadata["pid"] for rank in (0, 1))
        os.kill(killed, signal.SIGSTOP)
        before = -1
        while before != finished(out, 0):
            before = finished(out, 0)
            time.sleep(0.5)
        for process in (torchrun.pid, killed, hanging):
            os.kill(process, signal.SIGKILL)


class Ended:
    """The launch that ended, and its log."""

    def __init__(self, ending: str, outcome: Outcome, logs: Path, run: RunLog) -> None:
        self.ending = ending
        self.outcome = outcome
        self.logs = logs
        self.run = run

    def finished(self, rank: int) -> int:
        return finished(self.outcome.out, rank)

    @property
    def in_order(self) -> bool:
        """Whether rank 1 came to close its log."""
        return self.ending == "raise"


@pytest.fixture(scope="module", params=["kill", "exit", "raise", "interrupt", "terminate", "hang"])
def ended(
    request: pytest.FixtureRequest,
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Ended:
    logs = tmp_path_factory.mktemp("logs")
    during = getattr(FromOutside(logs, read_runs), request.param, None)
    outcome = launch(
        "killed",
        request.param if during is None else "outside",
        log_dir=logs,
        env={"DDPAN_SEGMENT_COLLECTIVES": str(SEGMENT)},
        check=False,
        during=during,
    )
    assert outcome.returncode != 0
    [run] = read_runs(logs)
    return Ended(request.param, outcome, logs, run)


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def log(ended: Ended, rank: int) -> RankLog:
    return ended.run.ranks[rank]


def test_ended_in_the_middle(ended: Ended) -> None:
    assert all(ended.finished(rank) >= BEFORE_THE_END for rank in (0, 1))
    folder = ended.run.ranks[1].path
    assert list(folder.glob("*.parquet")), "the log should consist of parts"
    if ended.ending in ("kill", "exit", "hang"):
        assert list(folder.glob("live-*.spool")), "and of a spool"


def test_every_finished_step_is_there(ended: Ended, log: RankLog, rank: int) -> None:
    steps = log.steps
    assert steps["step"].to_list() == list(range(steps.height))
    whole = steps.filter(pl.col("optimizer_end_ns").is_not_null())
    # The rank may have ended between the end of the optimizer and the script's own note of it.
    assert whole.height in (ended.finished(rank), ended.finished(rank) + 1)
    assert steps.height - whole.height in (0, 1)


def test_every_collective_is_there_once(ended: Ended, log: RankLog, rank: int) -> None:
    assert log.collectives["seq"].to_list() == list(range(log.collectives.height))
    buckets = log.buckets.filter(pl.col("step") < ended.finished(rank))
    per_step = buckets.group_by("step", maintain_order=True).agg("bucket")
    assert per_step["step"].to_list() == list(range(ended.finished(rank)))
    assert per_step["bucket"].to_list() == [[0], *([[0, 1]] * (ended.finished(rank) - 1))]
    assert buckets["end_ns"].null_count() == 0


def test_last_step_is_what_there_was_of_it(log: RankLog) -> None:
    last = log.buckets.filter(pl.col("step") == log.steps["step"].max())
    assert last["bucket"].to_list() == list(range(last.height))
    for row in log.steps.tail(1).iter_rows(named=True):
        known = [row[f"{phase}_end_ns"] is not None for phase in ("forward", "compute", "backward", "optimizer")]
        assert known == sorted(known, reverse=True), "a phase that is over has followed one that is over"


def test_metadata_of_the_rank_that_ended_it(ended: Ended) -> None:
    metadata = ended.run.ranks[1].metadata
    assert (metadata["rank"], metadata["world_size"]) == (1, 2)
    if ended.ending not in ("interrupt", "terminate"):
        assert metadata["closed"] == ended.in_order
    assert metadata["run"] == ended.run.path.name
    assert metadata["layouts"]["0"]["1"], "the buckets are described"
    assert metadata["settings"]["segment_collectives"] == SEGMENT


def test_summarize_answers(ended: Ended) -> None:
    answered = CliRunner().invoke(main, ["summarize", str(ended.logs)])
    assert answered.exit_code == 0, answered.output
    assert "2 of 2" in answered.output


def test_analysis_reads_as_much(ended: Ended, log: RankLog, rank: int) -> None:
    run = load(ended.logs)
    of_rank = pl.col("rank") == rank
    assert run.steps().filter(of_rank).select("step").collect()["step"].to_list() == log.steps["step"].to_list()
    assert run.collectives().filter(of_rank).select("seq").collect()["seq"].sort().equals(log.collectives["seq"])
