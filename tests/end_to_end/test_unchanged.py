"""Training is the same to the last bit, recorded or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RunLog

STEPS = 50
CONFIGURATIONS = [
    f"{dtype}, as_view={as_view}, set_to_none={set_to_none}"
    for dtype, as_view, set_to_none in itertools.product(("float32", "bfloat16"), (False, True), (False, True))
]


class Pair:
    """The same trainings, recorded and not."""

    def __init__(self, recorded: Outcome, unrecorded: Outcome, run: RunLog, world_size: int) -> None:
        self.recorded = recorded
        self.unrecorded = unrecorded
        self.run = run
        self.world_size = world_size


@pytest.fixture(scope="module", params=[2, 3])
def pair(
    request: pytest.FixtureRequest,
    launch: Callable[..., Outcome],
    unrecorded: Callable[[int], Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    logs = tmp_path_factory.mktemp("logs")
    ranks: int = request.param
    recorded = launch("configurations", ranks=ranks, log_dir=logs)
    [run] = read_runs(logs)
    return Pair(recorded, unrecorded(ranks), run, ranks)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_parameters_are_the_same_to_the_bit(pair: Pair, configuration: str) -> None:
    for rank in range(pair.world_size):
        assert pair.recorded.facts(rank)[configuration] == pair.unrecorded.facts(rank)[configuration]


def test_configurations_do_differ(pair: Pair) -> None:
    """The comparison can tell arithmetic apart: bfloat16 is not float32, and all ranks share one result."""
    hashes = pair.unrecorded.facts(0)
    assert sorted(hashes) == sorted(CONFIGURATIONS)
    assert len(set(hashes.values())) >= 2
    assert all(pair.unrecorded.facts(rank) == hashes for rank in range(pair.world_size))


def test_all_of_it_was_recorded(pair: Pair) -> None:
    modules = len(CONFIGURATIONS)
    for log in pair.run.ranks.values():
        assert log.steps["module"].to_list() == [m for m in range(modules) for _ in range(STEPS)]
        assert log.steps["step"].to_list() == list(range(STEPS)) * modules
        per_step = log.buckets.group_by("module", "step", maintain_order=True).len()
        assert per_step.height == modules * STEPS
        assert per_step.filter(step=0)["len"].to_list() == [1] * modules
        assert per_step.filter(per_step["step"] > 0)["len"].min() > 1  # type: ignore[operator] - not empty
        assert log.metadata["counters"]["errors"] == 0
