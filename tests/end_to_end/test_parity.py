"""The four windows of DDP's own logger: the same figures where it is right, and where it is not.

c10d publishes what it measured in an iteration during the forward of the next one, so what it says after forward i is
of step i - 1, and of the last step nothing. An iteration that it could not measure still counts in its average.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RunLog

STEPS = 45
FORWARD, BACKWARD, COMM, OVERLAP = WINDOWS = (
    "forward_compute",
    "backward_compute",
    "backward_comm",
    "backward_compute_comm_overlap",
)
Values = npt.NDArray[np.float64]


class Measured:
    """What both saw of the trainings of one rank, in ms."""

    def __init__(self, outcome: Outcome, run: RunLog, rank: int) -> None:
        self._said = outcome.facts(rank)
        self._log = run.ranks[rank]

    def c10d(self, module: str, window: str, *, average: bool = False) -> Values:
        """What the logger said after each forward, shape (forwards,)."""
        name = f"{'avg_' if average else ''}{window}_time"
        return np.array([said[name] for said in self._said[module]]) / 1e6

    def recorded(self, module: str, window: str) -> Values:
        """The window of each step with a backward, computed from the rows, shape (steps,)."""
        number = next(int(n) for n, info in self._log.metadata["modules"].items() if info["name"] == module)
        first = self._log.buckets.group_by("module", "step").agg(pl.col("launch_ns").min())
        rows = self._log.steps.filter(module=number).filter(pl.col("backward_end_ns").is_not_null())
        rows = rows.join(first, on=["module", "step"]).sort("step")
        begin, end = {
            FORWARD: ("forward_start_ns", "forward_end_ns"),
            BACKWARD: ("forward_end_ns", "compute_end_ns"),
            COMM: ("launch_ns", "backward_end_ns"),
            OVERLAP: ("launch_ns", "compute_end_ns"),
        }[window]
        return (rows[end] - rows[begin]).to_numpy() / 1e6


@pytest.fixture(scope="module")
def ranks(
    launch: Callable[..., Outcome],
    read_runs: Callable[[Path], list[RunLog]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Measured]:
    logs = tmp_path_factory.mktemp("logs")
    outcome = launch("parity", log_dir=logs)
    [run] = read_runs(logs)
    return [Measured(outcome, run, rank) for rank in (0, 1)]


@pytest.fixture(params=[0, 1])
def measured(ranks: list[Measured], request: pytest.FixtureRequest) -> Measured:
    rank: int = request.param
    return ranks[rank]


@pytest.mark.parametrize("window", WINDOWS)
def test_means_agree(measured: Measured, window: str) -> None:
    """Of the same iterations: all but the one of the first buckets."""
    theirs = measured.c10d("Varying", window)[1:]
    ours = measured.recorded("Varying", window)
    assert len(theirs) == len(ours) == STEPS
    assert ours[1:].mean() == pytest.approx(theirs[1:].mean(), rel=0.03, abs=0.3)


@pytest.mark.parametrize("window", WINDOWS)
def test_iterations_agree(measured: Measured, window: str) -> None:
    """Not only on average: three of four iterations agree to the same bound."""
    difference = np.abs(measured.recorded("Varying", window) - measured.c10d("Varying", window)[1:])
    assert np.quantile(difference, 0.75) < 0.3


def test_c10d_is_one_iteration_late(measured: Measured) -> None:
    """The forward sleeps 0, 8 and 16 ms in turn, so a value tells of which step it is."""
    said = measured.c10d("Varying", FORWARD)
    ours = measured.recorded("Varying", FORWARD)
    assert said[0] == 0
    of_the_step_before = np.abs(said[1:] - ours)
    of_the_same_step = np.abs(said[1:-1] - ours[1:])
    assert np.median(of_the_step_before) < 0.3
    assert np.median(of_the_same_step) > 5


def test_c10d_never_tells_the_last_iteration(measured: Measured) -> None:
    """When training ends, its average is that of all steps but the last."""
    said = measured.c10d("Varying", BACKWARD)
    average = measured.c10d("Varying", BACKWARD, average=True)
    at_the_end_of_training = average[-2]
    assert at_the_end_of_training == pytest.approx(said[1:-1].mean(), abs=1e-3)
    assert len(measured.recorded("Varying", BACKWARD)) == len(said[1:-1]) + 1


def test_iterations_that_c10d_cannot_measure_pull_its_average(measured: Measured) -> None:
    """Two backwards of about 40 ms, six forwards without one, two short ones: the six count as if they took 40 ms."""
    said = measured.c10d("Interrupted", BACKWARD)[1:]
    with_backward = said[[0, 1, 8, 9]]
    average = 0.0
    for counted, value in enumerate(said, start=1):
        if counted in (1, 2, 9, 10):
            average = (value + average * (counted - 1)) / counted
    c10d = measured.c10d("Interrupted", BACKWARD, average=True)[-1]
    assert c10d == pytest.approx(average, abs=1e-3)
    assert c10d > with_backward.mean() + 5
    ours = measured.recorded("Interrupted", BACKWARD)
    assert len(ours) == 4
    assert ours.mean() == pytest.approx(with_backward.mean(), rel=0.03, abs=0.3)
