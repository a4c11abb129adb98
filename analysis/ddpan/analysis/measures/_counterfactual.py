"""The time of steps had some ranks arrived with the median of all: the arithmetic of the what-if analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._inference import Matrix, median

__all__ = ["Counterfactual"]


@dataclass(frozen=True)
class Counterfactual:
    """Steps that can be replayed with other arrivals.

    Attributes:
        arrival_ns: arrival of each rank's last bucket since the start of the step, shape (steps, ranks), two ranks or
            more; NaN where unknown, but in every row some are known.
        step_time_ns: shape (steps,), without NaN.
    """

    arrival_ns: Matrix
    step_time_ns: Matrix

    @property
    def typical_ns(self) -> Matrix:
        """Arrival of the median rank of each step, of two ranks that of the earlier one; shape (steps,)."""
        if self.arrival_ns.shape[1] == 2:
            return np.asarray(np.nanmin(self.arrival_ns, axis=1))
        return median(self.arrival_ns, axis=1)

    def mean_ns(self) -> float:
        """Mean time of a step as recorded."""
        return float(self.step_time_ns.mean())

    def mean_with_ns(self, fixed: Sequence[int]) -> float:
        """Mean time of a step had the ranks in the columns ``fixed`` arrived with the median.

        What follows the last arrival, the transfer, takes as long as it did.
        """
        arrival = self._known()
        rest = np.delete(arrival, fixed, axis=1).max(axis=1, initial=-np.inf)
        return float((self.step_time_ns - arrival.max(axis=1) + np.maximum(rest, self.typical_ns)).mean())

    def saved_ns(self, fixed: Sequence[int] = ()) -> Matrix:
        """Mean time per step that each rank would save if it were put right after those in ``fixed``; shape (ranks,).

        Only the latest rank of a step holds it up, and only as far as the next one, or the median, is earlier.
        """
        arrival = self._known()
        arrival[:, list(fixed)] = -np.inf
        latest = arrival.argmax(axis=1)
        first, second = -np.partition(-arrival, 1, axis=1)[:, :2].T
        saved = np.maximum(first, self.typical_ns) - np.maximum(second, self.typical_ns)
        return np.asarray(np.bincount(latest, saved, minlength=arrival.shape[1]) / len(arrival))

    def costliest(self, count: int) -> list[int]:
        """Columns of up to ``count`` ranks to put right, one after the other, each the one that then saves most."""
        fixed: list[int] = []
        saved = self.saved_ns()
        while len(fixed) < count and saved.max() > 0:
            fixed.append(int(saved.argmax()))
            saved = self.saved_ns(fixed)
        return fixed

    def _known(self) -> Matrix:
        return np.where(np.isnan(self.arrival_ns), -np.inf, self.arrival_ns)
