"""Recording between `ddpan.collector.start` and `stop`, without a variable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.end_to_end.recorded import Recorded

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RunLog

Launch = Callable[..., "Outcome"]
ReadRuns = Callable[[Path], "list[RunLog]"]


@pytest.fixture(scope="module")
def explicit(launch: Launch, read_runs: ReadRuns, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    logs = tmp_path_factory.mktemp("logs")
    return Recorded(launch("explicit", str(logs), ranks=3), read_runs(logs))


@pytest.mark.parametrize("kind", ["Copying", "Viewing"])
def test_start_and_stop_around_parts_of_a_training(explicit: Recorded, kind: str) -> None:
    first, second = explicit.runs_of(kind)
    for run, steps in ((first, 3), (second, 4)):
        assert sorted(run.ranks) == [0, 1, 2]
        for log in run.ranks.values():
            assert log.steps["step"].to_list() == list(range(steps))
            assert log.buckets["step"].to_list() == list(range(steps))
            assert set(log.buckets["layout"]) == {1}, "the training had rebuilt its buckets before"
            assert log.metadata["closed"]
            assert log.metadata["counters"]["errors"] == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", ["Copying", "Viewing", "Brief"])
def test_start_and_stop_change_no_result(explicit: Recorded, kind: str, rank: int) -> None:
    assert explicit.outcome.facts(rank)["same"][kind]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_stop_leaves_torch_as_it_was(explicit: Recorded, rank: int) -> None:
    facts = explicit.outcome.facts(rank)
    assert facts["changed"] == []
    assert facts["threads"] == ["MainThread"]


def test_start_before_the_process_group(explicit: Recorded) -> None:
    for log in explicit.run_of("Early").ranks.values():
        assert log.steps["step"].to_list() == [0, 1, 2, 3, 4]
        assert log.buckets["layout"].to_list() == [0, 1, 1, 1, 1]
        assert log.metadata["closed"]


def test_explicit_recordings_are_runs_of_their_own(explicit: Recorded) -> None:
    assert len(explicit.runs) == 6
    assert len(explicit.outcome.said) == 6
