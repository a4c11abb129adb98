"""Training is the same to the last bit, recorded or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl
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

    def __init__(self, recorded: Outcome, run: RunLog, unrecorded: Outcome) -> None:
        self.recorded = recorded
        self.unrecorded = unrecorded
        self.run = run


@pytest.fixture(scope="module", params=[2, 3])
def pair(
    request: pytest.FixtureRequest,
    recorded: Callable[[int], tuple[Outcome, RunLog]],
    unrecorded: Callable[[int], Outcome],
) -> Pair:
    ranks: int = request.param
    return Pair(*recorded(ranks), unrecorded(ranks))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_parameters_are_the_same_to_the_bit(pair: Pair, configuration: str) -> None:
    for rank in pair.run.ranks:
        assert pair.recorded.facts(rank)[configuration] == pair.unrecorded.facts(rank)[configuration]


def test_configurations_do_differ(pair: Pair) -> None:
    """The comparison can tell arithmetic apart: bfloat16 is not float32, and all ranks share one result."""
    hashes = pair.unrecorded.facts(0)
    assert sorted(hashes) == sorted(CONFIGURATIONS)
    assert len(set(hashes.values())) >= 2
    assert all(pair.unrecorded.facts(rank) == hashes for rank in pair.run.ranks)


def test_all_of_it_was_recorded(pair: Pair) -> None:
    modules = len(CONFIGURATIONS)
    for log in pair.run.ranks.values():
        assert log.steps["module"].to_list() == [m for m in range(modules) for _ in range(STEPS)]
        assert log.steps["step"].to_list() == list(range(STEPS)) * modules
        per_step = log.buckets.group_by("module", "step", maintain_order=True).len()
        assert per_step.height == modules * STEPS
        assert per_step.filter(step=0)["len"].to_list() == [1] * modules
        assert min(per_step.filter(pl.col("step") > 0)["len"].to_list()) > 1
        assert log.metadata["counters"]["errors"] == 0
