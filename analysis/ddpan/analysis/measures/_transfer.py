"""The transfer itself: whether from a step on, or for a while, it takes longer although no rank is late."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ._evidence import LEAST_BLOCKS, SHORTEST_STRETCH, SIGNIFICANCE, SMALLEST_SHARE
from ._inference import Matrix, block_edges, block_medians, correlation_steps, mean_interval, median
from ._noise import without_levels
from ._stretch import change_p_values, find_stretches, refine

__all__ = ["SlowTransfer", "find_slow_transfer"]

_MOST_BLOCKS: Final = 64
_INTERVAL_BLOCKS: Final = 16
_LEAST_GROWTH: Final = 0.25
"""Share of the usual transfer by which it must have grown: less is within what networks do."""


@dataclass(frozen=True)
class SlowTransfer:
    """A stretch of steps in which the transfer takes longer than in the others.

    Attributes:
        affected: the steps, shape (steps,).
        lasts: whether it lasts to the end of the run.
        usual_ns: median time of the transfer in the other steps.
        delay_ns: how much longer it takes in these.
        low_ns: lower end of the 95 % interval of the delay.
        high_ns: upper end.
        p_value: chance of so clear a change anywhere in the run if there was none.
    """

    affected: npt.NDArray[np.bool_]
    lasts: bool
    usual_ns: float
    delay_ns: float
    low_ns: float
    high_ns: float
    p_value: float


def find_slow_transfer(transfer_ns: Matrix, step_time_ns: float) -> SlowTransfer | None:
    """The stretch in which the transfer is slow; None if there is none of significance and size.

    Args:
        transfer_ns: what remains of each step after the latest arrival, shape (steps,); not finite where unknown.
        step_time_ns: mean time of a step.
    """
    known = np.flatnonzero(np.isfinite(transfer_ns))
    values = transfer_ns[known][:, None]
    if len(known) == 0:
        return None
    memory = correlation_steps(without_levels(values))
    edges = block_edges(len(known), memory, most=_MOST_BLOCKS)
    blocks = block_medians(values, edges)
    stretches = find_stretches(blocks, shortest=SHORTEST_STRETCH)
    if len(blocks) < LEAST_BLOCKS or stretches is None:
        return None
    p_value = float(change_p_values(len(blocks), stretches)[0])
    if p_value >= SIGNIFICANCE:
        return None
    reach = int(np.diff(edges).max())
    first, end = refine(values[:, 0], int(edges[stretches.first[0]]), int(edges[stretches.end[0]]), reach)
    affected = np.zeros(len(transfer_ns), np.bool_)
    affected[known[first] : known[end - 1] + 1] = True
    found = _measured(transfer_ns, affected, memory, lasts=end == len(known), p_value=p_value)
    large = found.low_ns > SMALLEST_SHARE * step_time_ns and found.delay_ns > _LEAST_GROWTH * found.usual_ns
    return found if large else None


def _measured(
    transfer_ns: Matrix, affected: npt.NDArray[np.bool_], memory: float, *, lasts: bool, p_value: float
) -> SlowTransfer:
    """The difference of the means of blocks inside and outside; halves of independent intervals add up as squares."""
    known = np.isfinite(transfer_ns)
    means, halves = [], []
    for part in (affected, ~affected):
        values = transfer_ns[part & known][:, None]
        edges = block_edges(len(values), memory, most=_INTERVAL_BLOCKS)
        interval = mean_interval(block_medians(values, edges))
        means.append(float(interval.middle[0]))
        halves.append(float(np.nan_to_num(interval.high[0] - interval.middle[0], nan=np.inf)))
    delay = means[0] - means[1]
    half = math.hypot(*halves)
    usual = float(median(transfer_ns[~affected & known]))
    return SlowTransfer(affected, lasts, usual, delay, delay - half, delay + half, p_value)
