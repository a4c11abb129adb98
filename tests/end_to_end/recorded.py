"""A launch and the log that it left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, RunLog

__all__ = ["Recorded"]


class Recorded:
    """A launch and its log."""

    def __init__(self, outcome: Outcome, runs: list[RunLog]) -> None:
        self.outcome = outcome
        self.runs = runs

    def run_of(self, module: str) -> RunLog:
        """The one run whose first module is of class ``module``."""
        [run] = self.runs_of(module)
        return run

    def runs_of(self, module: str) -> list[RunLog]:
        return [run for run in self.runs if run.ranks[0].metadata["modules"]["0"]["name"] == module]
