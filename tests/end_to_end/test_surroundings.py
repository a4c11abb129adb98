"""Whatever happens around the recorder, training ends with the same parameters, and the log says what it lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddpan.analysis import load

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

STEPS = 300
DELAY_S = 2.0
RANKS = (0, 1)
NAMESPACE = ["unshare", "--mount", "--map-root-user"]

SAID = {
    "nothing": None,
    "truncated": "damaged or removed by somebody else",
    "rank_removed": "damaged or removed by somebody else",
    "log_removed": "No such file or directory",
    "permission_lost": "Permission denied",
    "no_room": "File too large",
    "clock_set_back": None,
    "slow": "events come faster",
    "read_only": "Read-only file system",
}
"""What a fault is said to be, None where there is nothing to say."""

WHOLE = ("nothing", "truncated", "permission_lost", "no_room", "clock_set_back", "slow", "read_only")
"""Faults after which every event is in the log or counted."""


@dataclass(frozen=True)
class Surroundings:
    """The launch whose surroundings broke, and its logs."""

    outcome: Outcome
    logs: Path
    read_runs: Callable[[Path], list[RunLog]]

    def facts(self, fault: str) -> list[Any]:
        """What each rank says of its training under ``fault``."""
        facts = [self.outcome.facts(rank) for rank in RANKS]
        if fault not in facts[0]:
            pytest.skip("a file system that cannot be written needs the right to mount one")
        return [of_rank[fault] for of_rank in facts]

    def ranks(self, fault: str) -> list[RankLog]:
        """The logs of the training under ``fault``."""
        self.facts(fault)
        [run] = self.read_runs(self.logs / fault)
        return [run.ranks[rank] for rank in RANKS]


def may_mount() -> bool:
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0


@pytest.fixture(scope="module")
def surroundings(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Surroundings:
    logs = tmp_path_factory.mktemp("logs")
    mounting = may_mount()
    env = {"DDPAN_SEGMENT_COLLECTIVES": "256", "DDPAN_QUIET": "1"} | ({"MAY_MOUNT": "1"} if mounting else {})
    outcome = launch("surroundings", str(logs), env=env, prefix=NAMESPACE if mounting else [])
    return Surroundings(outcome, logs, read_runs)


@pytest.mark.parametrize("fault", SAID)
def test_training_is_unchanged(surroundings: Surroundings, fault: str) -> None:
    assert [facts["same"] for facts in surroundings.facts(fault)] == [True, True]


@pytest.mark.parametrize("fault", SAID)
def test_one_line_says_what_happened(surroundings: Surroundings, fault: str) -> None:
    expected = SAID[fault]
    for facts in surroundings.facts(fault):
        # Segments are so small here that a busy machine may be too slow for them at any time.
        said = [line for line in facts["said"] if fault == "slow" or "events come faster" not in line]
        if expected is None:
            assert said == []
        else:
            [line] = said
            assert expected in line
            assert "training goes on" in line


def events(log: RankLog) -> int:
    return log.steps.height + log.collectives.height


@pytest.mark.parametrize("fault", WHOLE)
def test_every_event_is_there_or_counted(surroundings: Surroundings, fault: str) -> None:
    for log, healthy in zip(surroundings.ranks(fault), surroundings.ranks("nothing"), strict=True):
        assert log.collectives["seq"].n_unique() == log.collectives.height
        assert events(log) + sum(log.dropped.values()) == events(healthy) + sum(healthy.dropped.values())
        assert log.metadata["counters"]["errors"] == 0


@pytest.mark.parametrize("fault", ["permission_lost", "no_room", "read_only"])
def test_events_that_found_no_place_are_counted(surroundings: Surroundings, fault: str) -> None:
    for log in surroundings.ranks(fault):
        assert log.metadata["counters"]["dropped"]["disk_error"] > 0


@pytest.mark.parametrize("fault", ["truncated", "rank_removed"])
def test_repairs_are_counted(surroundings: Surroundings, fault: str) -> None:
    for log in surroundings.ranks(fault):
        assert log.metadata["counters"]["spool_repairs"] >= 1


def test_after_a_removal_the_rest_is_recorded(surroundings: Surroundings) -> None:
    for log in surroundings.ranks("rank_removed"):
        assert log.steps["step"].max() == STEPS - 1
        assert log.metadata["closed"]


def test_removed_log_stays_removed(surroundings: Surroundings) -> None:
    surroundings.facts("log_removed")
    assert not (surroundings.logs / "log_removed").exists()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("truncated", "spool_repairs"),
        ("rank_removed", "spool_repairs"),
        ("permission_lost", "dropped_events"),
        ("no_room", "dropped_events"),
        ("slow", "dropped_events"),
        ("read_only", "dropped_events"),
    ],
)
def test_analysis_reports_it(surroundings: Surroundings, fault: str, problem: str) -> None:
    surroundings.facts(fault)
    [found] = [p for p in load(surroundings.logs / fault).problems if p.kind == problem]
    assert found.ranks == RANKS


def test_time_goes_on_when_the_clock_is_set_back(surroundings: Surroundings) -> None:
    for log in surroundings.ranks("clock_set_back"):
        starts = log.steps["forward_start_ns"]
        assert starts.is_sorted()
        assert (log.steps["optimizer_end_ns"] > starts).all()


def test_training_does_not_wait_for_a_slow_file_system(surroundings: Surroundings) -> None:
    for facts in surroundings.facts("slow"):
        assert facts["calls_by_training"] == []
        assert facts["longest_step_s"] < DELAY_S
