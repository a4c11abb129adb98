"""However long a training is, the recorder's memory stays the same, and so does its log where it has a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddpan.analysis import load

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RankLog, RunLog

STEPS = 3000
STEPS_LONG = 100_000
MAX_GROWTH_BYTES = 20_000_000
LIMIT_BYTES = 1_000_000


@dataclass(frozen=True)
class Endurance:
    """A long training.

    Attributes:
        steps: how many it had.
        looks: what it saw of its memory, from the first step on.
        logs: its log folder.
        log: the log of its one rank.
    """

    steps: int
    looks: list[dict[str, int]]
    logs: Path
    log: RankLog


@pytest.fixture(scope="module", params=["sample", "oldest"])
def endurance(
    request: pytest.FixtureRequest,
    run_python: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    long: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Endurance:
    if request.param == "oldest" and not long:
        pytest.skip("one of the two is enough, unless --long asks for both")
    logs = tmp_path_factory.mktemp("logs")
    steps = STEPS_LONG if long else STEPS
    env = {"DDPAN_SEGMENT_COLLECTIVES": "256", "DDPAN_MAX_BYTES": f"{LIMIT_BYTES},{request.param}"}
    outcome = run_python("endurance", str(steps), log_dir=logs, env=env, timeout=1200)
    [run] = read_runs(logs)
    return Endurance(steps, outcome.facts(0), logs, run.ranks[0])


@pytest.mark.timeout(1200)
def test_memory_does_not_grow(endurance: Endurance) -> None:
    _, first, *_, last = endurance.looks
    grown = {what: last[what] - first[what] for what in first}
    print(f"\nfrom step {first['step']} to {last['step']}: {grown}")  # noqa: T201 - the figures, with -s
    assert grown["resident_bytes"] < MAX_GROWTH_BYTES
    # One object that stayed behind in each step would be one block or more; what the background thread has in its hands
    # is some hundreds, however long the training.
    assert grown["python_blocks"] < 0.5 * grown["step"]


def test_log_keeps_its_limit(endurance: Endurance) -> None:
    files = sum(path.stat().st_size for path in endurance.log.path.iterdir())
    assert files <= LIMIT_BYTES
    assert endurance.log.metadata["counters"]["removed_parts"] > 0


def test_kept_parts_are_what_was_asked_for(endurance: Endurance) -> None:
    metadata: dict[str, Any] = endurance.log.metadata["settings"]
    size, policy = metadata["limit"].split(",")
    assert int(size) == LIMIT_BYTES
    steps = endurance.log.steps["step"]
    assert endurance.log.metadata["closed"], "the last part is always there"
    if policy == "oldest":
        assert steps.min() > 0  # type: ignore[operator]
    else:
        assert steps.min() == 0
        assert steps.n_unique() < endurance.steps
    # Events come fast here, for segments as small as these.
    assert {problem.kind for problem in load(endurance.logs).problems} - {"dropped_events"} == {"removed_parts"}
