"""Whatever happens to the recorder, training goes on and ends with the same parameters."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from ddpan.analysis import load

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

Launch = Callable[..., "Outcome"]
ReadRuns = Callable[[Path], "list[RunLog]"]


@pytest.fixture(scope="module")
def unwritable(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A launch that is to record below a file, with nonsense in its other variables."""
    file = tmp_path_factory.mktemp("unwritable") / "file"
    file.write_text("not a folder")
    nonsense = {"DDPAN_SEGMENT_COLLECTIVES": "lots", "DDPAN_QUIET": "perhaps"}
    return launch("configurations", log_dir=file / "logs", env=nonsense), file


def test_folder_that_cannot_be_made(unwritable: tuple[Outcome, Path], unrecorded: Callable[[int], Outcome]) -> None:
    outcome, file = unwritable
    assert outcome.facts(0) == unrecorded(2).facts(0)
    assert outcome.facts(1) == unrecorded(2).facts(1)
    about_the_folder = [line for line in outcome.said if str(file) in line]
    assert len(about_the_folder) == 2, "each rank says it once"
    for line in about_the_folder:
        assert "warning" in line
        assert "Not a directory" in line
        assert "Training goes on" in line
    assert file.read_text() == "not a folder"
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [("DDPAN_SEGMENT_COLLECTIVES", "lots", "a number from 256"), ("DDPAN_QUIET", "perhaps", "0 or 1")],
)
def test_bad_value(unwritable: tuple[Outcome, Path], variable: str, value: str, accepted: str) -> None:
    outcome, _ = unwritable
    lines = [line for line in outcome.said if variable in line]
    assert 1 <= len(lines) <= 3, "at most one for each process, torchrun's included"
    for line in lines:
        assert "warning" in line
        assert repr(value) in line
        assert accepted in line
        assert "default" in line


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 256 KB."""
    folder = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system to fill needs the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def filled(launch: Launch, read_runs: ReadRuns, small_disk: Path) -> tuple[Outcome, RunLog]:
    """A launch whose log outgrows its file system."""
    outcome = launch("configurations", log_dir=small_disk, env={"DDPAN_SEGMENT_COLLECTIVES": "256"})
    [run] = read_runs(small_disk)
    return outcome, run


def test_disk_that_fills_up(filled: tuple[Outcome, RunLog], unrecorded: Callable[[int], Outcome]) -> None:
    outcome, _ = filled
    assert outcome.facts(0) == unrecorded(2).facts(0)
    assert outcome.facts(1) == unrecorded(2).facts(1)
    assert "Traceback" not in outcome.stderr
    warnings = [line for line in outcome.said if "warning" in line]
    assert any("disk is full" in line or "No space left" in line for line in warnings)
    assert all("raining goes on" in line for line in warnings)
    assert len(warnings) == len({line.partition("ddpan:")[2] for line in warnings}), "each rank says each thing once"


def events(log: RankLog) -> int:
    return log.steps.height + log.collectives.height


def test_log_of_a_full_disk_says_what_is_missing(
    filled: tuple[Outcome, RunLog], recorded: Callable[[int], tuple[Outcome, RunLog]]
) -> None:
    _, run = filled
    _, whole = recorded(2)
    for rank, log in run.ranks.items():
        missing = events(whole.ranks[rank]) - events(log)
        assert missing > 0, "the disk should have been too small"
        assert sum(log.dropped.values()) == missing
        assert log.collectives["seq"].n_unique() == log.collectives.height


LEFT_OUT = {
    "collector.stop": "called by the user",
    "session.stop": "called by the user",
    "dataloader.__next__": "calls what it wraps",
    "functions.collective": "calls what it wraps",
    "groups.destroy_process_group": "calls what it wraps",
    "groups.init_process_group": "calls what it wraps",
    "groups.new_process_group": "calls what it wraps",
    "patching.method": "calls what it wraps",
    "reducer_group.allreduce": "does the reduction in the group's place",
    "reducer_group.broadcast": "does the broadcast in the group's place",
    "others.wait": "calls what it wraps",
    "optimizer.after": "asks torch whether it compiles",
    "optimizer.before": "asks torch whether it compiles",
}
"""Functions in which an exception before the first ``try`` is the training's own, and why."""


@pytest.fixture(scope="module")
def faults(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What came of trainings under a recorder that raises in one function, then in the next, by rank; and the logs."""
    logs = tmp_path_factory.mktemp("logs")
    outcome = launch("raising", str(logs), *LEFT_OUT, env={"DDPAN_QUIET": "1"})
    return [outcome.facts(rank) for rank in (0, 1)], logs


def test_no_mistake_of_the_recorder_reaches_the_training(faults: tuple[list[Any], Path]) -> None:
    ranks, _ = faults
    assert len(ranks[0]) > 120, "the functions that a training calls"
    for outcome in ranks:
        reached = {fault: came["raised"] or "other parameters" for fault, came in outcome.items() if not came["same"]}
        assert not reached, "\n".join(f"{fault}: {how}" for fault, how in reached.items())


@pytest.mark.parametrize("function", ["collectives.launch", "steps.begin_forward", "steps.end_backward"])
def test_mistakes_are_said_and_counted(faults: tuple[list[Any], Path], read_runs: ReadRuns, function: str) -> None:
    ranks, logs = faults
    [fault] = [name for name in ranks[0] if name.startswith(f"{function}:")]
    assert [outcome[fault]["said"] for outcome in ranks] == [["error"], ["error"]]
    [run] = read_runs(logs / fault)
    # Each of the four steps met the mistake.
    counted = [log.metadata["counters"]["errors"] for log in run.ranks.values()]
    assert min(counted) >= 4, counted
    reported = [problem.ranks for problem in load(logs / fault).problems if problem.kind == "recorder_errors"]
    assert reported == [(0, 1)]


def test_mistake_in_the_background_is_said(faults: tuple[list[Any], Path]) -> None:
    ranks, _ = faults
    [fault] = [name for name in ranks[0] if name.startswith("parts.write_part:")]
    assert [outcome[fault]["said"] for outcome in ranks] == [["thread"], ["thread"]]


def test_without_a_mistake_nothing_is_said(faults: tuple[list[Any], Path], read_runs: ReadRuns) -> None:
    ranks, logs = faults
    assert ranks[0]["healthy"]["said"] == ranks[1]["healthy"]["said"] == []
    [run] = read_runs(logs / "healthy")
    for log in run.ranks.values():
        assert log.steps["step"].to_list() == [0, 1, 2, 2, 3]
        assert log.collectives.filter(pl.col("bucket").is_null(), op="all_reduce").height == 4
