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
    mean_interval,
    median,
    place_p_values,
    row_means,
    total_p_values,
)
from ._noise import noise_of, quiet_noises
from ._stretch import change_p_values, exceedance_p_values, find_stretches

__all__ = ["LEAST_BLOCKS", "SHORTEST_STRETCH", "SIGNIFICANCE", "SMALLEST_SHARE", "Evidence", "late_p_values", "weigh"]

SIGNIFICANCE: Final = 0.01
"""Adjusted p-value below which a rank may be named."""

SMALLEST_SHARE: Final = 0.01
"""Share of the step time below which a delay is not worth naming a rank."""

SHORTEST_STRETCH: Final = 3
"""Blocks that a stretch, and the rest of the run beside it, must have for a change to be tested."""

LEAST_BLOCKS: Final = 4
"""Independent blocks of steps below which no rank is named."""

_LEAST_CHANGED_BLOCKS: Final = 5
_MOST_BLOCKS: Final = 64
_INTERVAL_BLOCKS: Final = 16
_LATE_SIGMAS: Final = 3.0
_FAR_LATE: Final = 3.0
_MOST_REFERENCES: Final = 8
_RANKS_AT_ONCE: Final = 128
_NOISE_SHARE: Final = 0.75
_SCATTERED: Final = 0.5
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
        late_p_values: chance of a rank being so often the late one if all were alike, adjusted for the number of ranks
            and of tests, shape (ranks,).
        stretch_p_values: chance of so raised a stretch, adjusted likewise.
        p_values: the smallest of these and of that of the test for a steady delay, shape (ranks,).
    """

    arrival_ns: Matrix
    excess_ns: Matrix
    step_time_ns: float
    noise_ns: float
    late_ns: Matrix
    correlation: float
    edges: npt.NDArray[np.intp]
    blocks_ns: Matrix
    late_p_values: Matrix
    stretch_p_values: Matrix
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

        Typical are the others that are no outliers by lateness themselves; of more than eight, every so many-th by
        lateness. The difference of two alike ranks is symmetric even if their noise is not, which no other reference
        offers: the median of such differences estimates a delay without bias.

        Args:
            values_ns: shape (steps, ranks).
            ranks: columns to estimate.
            steps: which steps to look at, shape (steps,).

        Returns:
            an interval for each of ``ranks``.
        """
        chosen = [self._typical(int(rank)) for rank in ranks]
        typical = np.stack([one for one, _ in chosen])
        values = values_ns[steps]
        differences = np.where(typical >= 0, values[:, ranks, None] - values[:, typical], np.nan)
        edges = self._blocks_within(steps)
        blocks = block_medians(differences.reshape(len(values), -1), edges).reshape(-1, *typical.shape)
        means = row_means(blocks.reshape(-1, typical.shape[1])).reshape(-1, len(ranks))
        by_reference = row_means(blocks.reshape(len(blocks), -1).T).reshape(typical.shape)
        unseen = np.array([share for _, share in chosen])
        return mean_interval(means, chosen=by_reference, unseen=unseen)

    def _blocks_within(self, steps: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Edges of nearly independent blocks among the given steps alone: those apart from each other forget more.

        Where less than half of the steps are given, one after the other, each may be a block.
        """
        chosen = np.flatnonzero(steps)
        density = len(chosen) / (chosen[-1] - chosen[0] + 1) if len(chosen) else 1.0
        if density < _SCATTERED:
            return block_edges(len(chosen), self.correlation * density, most=_INTERVAL_BLOCKS, shortest=1)
        return block_edges(len(chosen), max(1.0, self.correlation * density), most=_INTERVAL_BLOCKS)

    def _typical(self, rank: int) -> tuple[npt.NDArray[np.intp], float]:
        """The ranks that this one is measured against.

        Returns:
            their columns, shape (eight,), filled up with -1; and the share of the typical ranks that are not among
            them.
        """
        distance = np.abs(self.level_ns - median(np.delete(self.level_ns, rank)))
        distance[rank] = np.inf
        alike = np.flatnonzero(distance <= self.floor_ns(rank))
        alike = alike[np.argsort(self.level_ns[alike])] if len(alike) else np.array([distance.argmin()])
        count = min(len(alike), _MOST_REFERENCES)
        # Evenly from the earliest to the latest, so that their mean is that of all.
        typical = np.full(_MOST_REFERENCES, -1)
        typical[:count] = alike[((np.arange(count) + 0.5) * len(alike) / count).astype(np.intp)]
        return typical, 1 - count / len(alike)

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
    residuals = noise_of(arrival_ns)
    noises = np.nan_to_num(MAD_TO_SIGMA * median(np.abs(residuals)))
    noise = float(np.median(noises))
    late_ns = np.maximum(SMALLEST_SHARE * step_time_ns, _LATE_SIGMAS * quiet_noises(excess, residuals))
    # Ranks may differ in noise; a noisier one is no straggler, so each is measured by its own, or the usual if larger.
    noises = np.maximum(noises, max(noise, 1.0))
    correlation = correlation_steps(residuals)
    edges = block_edges(len(excess), correlation, most=_MOST_BLOCKS)
    blocks = block_medians(excess, edges)
    # Half of the error that is allowed goes to the test for a steady delay, a quarter to late steps and to a stretch.
    # Heavy-tailed noise often passes the lower limit on every rank, and hides a delay that only the higher one shows.
    limits = (late_ns, _FAR_LATE * late_ns)
    late = len(limits) * np.min([late_p_values(excess > limit, edges) for limit in limits], axis=0)
    late = np.minimum(1.0, 4 * comparisons * late)
    stretch = np.minimum(1.0, 4 * comparisons * _stretch_p_values(blocks, noises))
    place = 2 * comparisons * place_p_values(blocks)
    return Evidence(
        arrival_ns=arrival_ns,
        excess_ns=excess,
        step_time_ns=step_time_ns,
        noise_ns=noise,
        late_ns=late_ns,
        correlation=correlation,
        edges=edges,
        blocks_ns=blocks,
        late_p_values=late,
        stretch_p_values=stretch,
        p_values=np.minimum(place, np.minimum(late, stretch)),
    )


def _stretch_p_values(blocks: Matrix, noises: Matrix) -> Matrix:
    """Chance of so raised a stretch of blocks if all ranks were alike, shape (ranks,): twice the smaller of two."""
    stretches = find_stretches(blocks, shortest=SHORTEST_STRETCH)
    raised = exceedance_p_values(blocks, noises, stretches)
    if stretches is None:
        return raised
    # Student's test takes blocks for normal: a few late steps near each other would break that, a longer stretch of
    # them does not come by chance.
    long = stretches.end - stretches.first >= _LEAST_CHANGED_BLOCKS
    changed = np.where(long, change_p_values(len(blocks), stretches), 1.0)
    return np.asarray(2 * np.minimum(raised, changed))


def late_p_values(late: npt.NDArray[np.bool_], edges: npt.NDArray[np.intp]) -> Matrix:
    """Chance of a rank being late in so many steps of those in which some rank is late, shape (ranks,).

    Args:
        late: which rank is late in which step, shape (steps, ranks).
        edges: edges of the blocks.
    """
    return total_p_values(np.stack([late[a:b].sum(axis=0) for a, b in pairwise(edges)]))
