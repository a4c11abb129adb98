"""What a comparison of ranks shows: how late each is, how sure that is, and what counts as too small to matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ._inference import (
    MAD_TO_SIGMA,
    Interval,
    Matrix,
    block_edges,
    block_medians,
    correlation_steps,
    excess_over_others,
    frequency_p_values,
    mean_interval,
    median,
    place_p_values,
    row_means,
)
from ._stretch import exceedance_p_values, find_stretches

__all__ = ["LEAST_BLOCKS", "SHORTEST_STRETCH", "SIGNIFICANCE", "SMALLEST_SHARE", "Evidence", "late_p_values", "weigh"]

SIGNIFICANCE: Final = 0.01
"""Adjusted p-value below which a rank may be named."""

SMALLEST_SHARE: Final = 0.01
"""Share of the step time below which a delay is not worth naming a rank."""

SHORTEST_STRETCH: Final = 3
"""Blocks that a stretch, and the rest of the run beside it, must have for a change to be tested."""

LEAST_BLOCKS: Final = 4
"""Independent blocks of steps below which no rank is named."""

_MOST_BLOCKS: Final = 64
_TREND_BLOCKS: Final = 32
_TREND_EXPLAINS: Final = 0.8
_LATE_SIGMAS: Final = 3.0
_MOST_REFERENCES: Final = 8
_RANKS_AT_ONCE: Final = 128
_NOISE_SHARE: Final = 0.75
_SPREAD_SIGMAS: Final = 3.0


@dataclass(frozen=True)
class Evidence:
    """What the lateness of some ranks against each other shows.

    Attributes:
        arrival_ns: as given to `weigh`, shape (steps, ranks).
        excess_ns: lateness of each rank against the median of the others, shape (steps, ranks).
        step_time_ns: mean time of a step.
        noise_ns: spread of a healthy rank's lateness from step to step, as a standard deviation.
        late_ns: lateness above which each rank is late in a step, not merely noisy, shape (ranks,).
        correlation: steps after which the noise forgets itself, 1 or more.
        edges: edges of the nearly independent blocks of steps.
        blocks_ns: median lateness in each block, shape (blocks, ranks).
        p_values: chance of a rank standing out so clearly if all were alike, adjusted for the number of ranks and of
            tests, shape (ranks,).
    """

    arrival_ns: Matrix
    excess_ns: Matrix
    step_time_ns: float
    noise_ns: float
    late_ns: Matrix
    correlation: float
    edges: npt.NDArray[np.intp]
    blocks_ns: Matrix
    p_values: Matrix

    @property
    def smallest_ns(self) -> float:
        """A delay that is not surely larger than this is not worth naming a rank."""
        return SMALLEST_SHARE * self.step_time_ns

    @cached_property
    def level_ns(self) -> Matrix:
        """Median lateness of each rank, shape (ranks,)."""
        return median(self.excess_ns)

    @cached_property
    def interval(self) -> Interval:
        """Delay of each rank against the others, over all steps, with its confidence interval."""
        ranks = np.arange(len(self.level_ns))
        steps = np.ones(len(self.excess_ns), np.bool_)
        parts = [
            self.estimate(self.arrival_ns, ranks[at : at + _RANKS_AT_ONCE], steps)
            for at in range(0, len(ranks), _RANKS_AT_ONCE)
        ]
        return Interval(*(np.concatenate([getattr(part, end) for part in parts]) for end in ("middle", "low", "high")))

    @cached_property
    def late(self) -> npt.NDArray[np.bool_]:
        """Which rank is late in which step, shape (steps, ranks)."""
        return np.asarray(self.excess_ns > self.late_ns)

    def estimate(self, values_ns: Matrix, ranks: npt.NDArray[np.intp], steps: npt.NDArray[np.bool_]) -> Interval:
        """By how much ``values_ns`` of some ranks exceed those of typical other ranks in ``steps``.

        Typical are the others that are no outliers by lateness themselves, at most the eight nearest to their median.
        The difference of two alike ranks is symmetric even if their noise is not, which no other reference offers:
        the median of such differences estimates a delay without bias.

        Args:
            values_ns: shape (steps, ranks).
            ranks: columns to estimate.
            steps: which steps to look at, shape (steps,).

        Returns:
            an interval for each of ``ranks``.
        """
        typical = np.stack([self._typical(int(rank)) for rank in ranks])
        values = values_ns[steps]
        differences = np.where(typical >= 0, values[:, ranks, None] - values[:, typical], np.nan)
        edges = block_edges(len(values), self.correlation, most=_MOST_BLOCKS)
        blocks = block_medians(differences.reshape(len(values), -1), edges)
        return mean_interval(row_means(blocks.reshape(-1, typical.shape[1])).reshape(-1, len(ranks)))

    def _typical(self, rank: int) -> npt.NDArray[np.intp]:
        """Columns of the ranks that this one is measured against, shape (eight,), filled up with -1."""
        distance = np.abs(self.level_ns - median(np.delete(self.level_ns, rank)))
        distance[rank] = np.inf
        near = np.argsort(distance)[:_MOST_REFERENCES]
        alike = (distance[near] <= self.floor_ns(rank)) | (np.arange(len(near)) == 0)
        typical = np.full(_MOST_REFERENCES, -1)
        typical[: alike.sum()] = near[alike]
        return typical

    def floor_ns(self, rank: int) -> float:
        """Delays of the rank in this column below this cannot be told from the differences between healthy ranks.

        The largest of: three quarters of the noise of one step, three times the spread of the other ranks' median
        latenesses, and the smallest delay worth naming.
        """
        others = np.delete(self.level_ns, rank)
        spread = MAD_TO_SIGMA * float(np.nan_to_num(median(np.abs(others - median(others)))))
        return max(_NOISE_SHARE * self.noise_ns, _SPREAD_SIGMAS * spread, self.smallest_ns)

    def steps_needed(self) -> int:
        """Steps at which a rank that is always the latest could be named, given the correlation found."""
        ranks = self.excess_ns.shape[1]
        length = self.excess_ns.shape[0] / len(self.blocks_ns)
        for count in range(LEAST_BLOCKS, _MOST_BLOCKS):
            always_last = np.tile(np.arange(ranks, dtype=np.float64), (count, 1))
            if 2 * ranks * place_p_values(always_last)[-1] < SIGNIFICANCE:
                return int(np.ceil(count * length))
        return int(np.ceil(_MOST_BLOCKS * length))


def weigh(arrival_ns: Matrix, step_time_ns: float, *, comparisons: int) -> Evidence:
    """Gather the evidence.

    Args:
        arrival_ns: when each rank launched the last bucket of a step, counted from the moment that the ranks left the
            last bucket of the step before; shape (steps, ranks), NaN where unknown. At least two ranks.
        step_time_ns: mean time of a step.
        comparisons: number of ranks that are tested in all, here and elsewhere in the same run.
    """
    excess = excess_over_others(arrival_ns)
    residuals = _residuals(excess)
    noises = np.nan_to_num(MAD_TO_SIGMA * median(np.abs(residuals)))
    noise = float(np.median(noises))
    # Ranks may differ in noise; a noisier one is no straggler, so each is measured by its own, or the usual if larger.
    noises = np.maximum(noises, max(noise, 1.0))
    late_ns = np.maximum(SMALLEST_SHARE * step_time_ns, _LATE_SIGMAS * noises)
    correlation = correlation_steps(residuals)
    edges = block_edges(len(excess), correlation, most=_MOST_BLOCKS)
    blocks = block_medians(excess, edges)
    stretches = find_stretches(blocks, shortest=SHORTEST_STRETCH)
    stretch = exceedance_p_values(blocks, noises, stretches)
    # Half of the error that is allowed goes to the test for a steady delay, a quarter to each of the others.
    tests = (2 * place_p_values(blocks), 4 * late_p_values(excess > late_ns, edges), 4 * stretch)
    return Evidence(
        arrival_ns=arrival_ns,
        excess_ns=excess,
        step_time_ns=step_time_ns,
        noise_ns=noise,
        late_ns=late_ns,
        correlation=correlation,
        edges=edges,
        blocks_ns=blocks,
        p_values=np.minimum(1.0, comparisons * np.minimum.reduce(tests)),
    )


def late_p_values(late: npt.NDArray[np.bool_], edges: npt.NDArray[np.intp]) -> Matrix:
    """Chance of a rank being the late one in so many blocks of those in which some rank is late, shape (ranks,).

    The late one of a block is the rank with most late steps; where several have as many, each gets its share, which
    makes the p-value larger than it need be.

    Args:
        late: which rank is late in which step, shape (steps, ranks).
        edges: edges of the blocks.
    """
    counts = np.stack([late[a:b].sum(axis=0) for a, b in pairwise(edges)])
    counts = counts[counts.any(axis=1)]
    most = counts == counts.max(axis=1, keepdims=True)
    shares = np.sum(most / most.sum(axis=1, keepdims=True), axis=0)
    return frequency_p_values(np.floor(shares + 1e-9).astype(np.intp), len(counts))


def _residuals(excess: Matrix) -> Matrix:
    """The lateness without each rank's level, and without its change where one stretch obviously has another level.

    What remains is noise: a fault that comes or goes must not pass for slow noise.
    """
    levels = np.broadcast_to(median(excess), excess.shape).copy()
    edges = np.linspace(0, len(excess), min(len(excess), _TREND_BLOCKS) + 1).round().astype(np.intp)
    stretches = find_stretches(block_medians(excess, edges), shortest=1, raised=False)
    if stretches is not None:
        for rank in np.flatnonzero(stretches.explained > _TREND_EXPLAINS):
            inside = np.zeros(len(excess), np.bool_)
            inside[edges[stretches.first[rank]] : edges[stretches.end[rank]]] = True
            levels[inside, rank] = median(excess[inside, rank])
            levels[~inside, rank] = median(excess[~inside, rank])
    return np.asarray(excess - levels)
