"""What each rank did in each step, from its own times alone: phases, windows, and the start and end of the step.

Arrays are of shape (steps, ranks), float64 nanoseconds, NaN where unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ._lattice import Floats, Integers, Lattice

__all__ = ["Previous", "windows"]

_CARRIED: Final = ("step_end_ns", "optimizer_start_ns", "optimizer_end_ns")


@dataclass
class Previous:
    """The last step of the block before, for what reaches from one step into the next."""

    step: int = -1
    moments: dict[str, Floats] = field(default_factory=dict)

    def of(self, steps: Integers, moments: Mapping[str, Floats]) -> dict[str, Floats]:
        """Each step's predecessor in ``moments``, NaN where that step is not known; then move on to this block."""
        follows = np.diff(steps, prepend=self.step) == 1
        before = {}
        for name in _CARRIED:
            now = moments[name]
            first = self.moments.get(name, np.full(now.shape[1], np.nan))
            before[name] = np.where(follows[:, None], np.concatenate([first[None], now[:-1]]), np.nan)
            # A copy, so that the block's array is not kept alive by its last row.
            self.moments[name] = now[-1].copy()
        self.step = int(steps[-1])
        return before


def windows(lattice: Lattice, previous: Previous) -> dict[str, Floats]:
    """Moments (relative to each rank's base) and durations of every step and rank, by column name."""
    times = lattice.times
    first_launch, last_launch = _at(lattice.launch, lattice.count, 0), _at(lattice.launch, lattice.count, -1)
    end = _at(lattice.end, lattice.count, -1)
    before = previous.of(lattice.steps, {"step_end_ns": end, **times})
    start = before["step_end_ns"]
    optimizer = before["optimizer_end_ns"] - np.maximum(before["optimizer_start_ns"], start)
    backward = times["earlier_backward_ns"] + last_launch - times["forward_end_ns"]
    known = times["data_ns"] + times["forward_ns"] + backward
    return {
        "forward_start_ns": times["first_forward_start_ns"],
        "step_start_ns": start,
        "step_end_ns": end,
        "step_time_ns": end - start,
        "data_ns": times["data_ns"],
        "forward_ns": times["forward_ns"],
        "backward_ns": backward,
        "backward_compute_ns": times["compute_end_ns"] - times["forward_end_ns"],
        "optimizer_ns": optimizer,
        # Where no optimizer was seen, its time cannot be told from the rest.
        "other_ns": last_launch - start - known - np.where(np.isnan(optimizer), 0.0, optimizer),
        "c10d_forward_ns": times["forward_end_ns"] - times["forward_start_ns"],
        "c10d_backward_comm_ns": times["backward_end_ns"] - first_launch,
        "c10d_overlap_ns": times["compute_end_ns"] - first_launch,
        "tail_ns": times["backward_end_ns"] - times["compute_end_ns"],
        "arrival_ns": last_launch - start,
        "first_arrival_ns": first_launch - start,
        "micro_batches": times["micro_batches"],
    }


def _at(moments: Floats, count: Integers, bucket: int) -> Floats:
    """Moments of the first (0) or last (-1) bucket of each step, NaN where the step has none."""
    steps, buckets, ranks = moments.shape
    if buckets == 0:
        return np.full((steps, ranks), np.nan)
    found = moments[np.arange(steps), 0 if bucket == 0 else np.maximum(count - 1, 0)]
    return np.where((count > 0)[:, None], found, np.nan)
