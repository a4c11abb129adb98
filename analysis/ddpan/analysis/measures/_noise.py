"""The noise of ranks apart from their faults: lateness without levels that change, and its spread on the quiet side.

Arrays are of shape (steps, ranks) with NaN where a value is missing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ._inference import MAD_TO_SIGMA, Matrix, block_medians, excess_over_others, median
from ._stretch import find_stretches, refine

__all__ = ["noise_of", "quiet_noises", "without_levels"]

_BLOCKS: Final = 32
_LEAST_STEPS: Final = 8
_WINSOR_SIGMAS: Final = 3.0
_LEAST_EXPLAINED: Final = 0.1
"""Share of the variance below which a change does no harm."""

_SCALE_ITERATIONS: Final = 8

_FEW_RANKS: Final = 4
"""Ranks up to which a single one moves the median of the others much."""

_TOLERANCE: Final = 1.3
"""Times the usual noise that a rank's own must exceed, as estimated from few steps, to count as larger."""

_TENTH_TO_THIRD: Final = 0.7572
"""Distance of the quantiles of 10 and 30 % of the normal distribution, in standard deviations."""


def noise_of(arrival: Matrix) -> Matrix:
    """The lateness of each rank against the others without levels, as `without_levels` leaves it.

    Of few ranks, one whose level changes moves what the others are measured against. So the change that is surest is
    taken out of that rank's arrivals first.
    """
    excess = excess_over_others(arrival)
    if arrival.shape[1] <= _FEW_RANKS and (levels := _levels(excess)):
        rank = max(levels, key=lambda column: levels[column][1])
        arrival = arrival.copy()
        arrival[:, rank] -= levels[rank][0]
        excess = excess_over_others(arrival)
    return without_levels(excess)


def without_levels(excess: Matrix) -> Matrix:
    """The lateness without each rank's level, and without its change where one stretch has another level.

    What remains is noise: a fault that comes or goes must not pass for slow noise, nor slow noise for a fault. The
    change is taken out if autoregressive noise with it is more likely than without it: around a true change, noise
    jumps once and is otherwise as short-lived as ever.
    """
    residuals = np.asarray(excess - median(excess))
    for rank, (level, _) in _levels(excess).items():
        residuals[:, rank] = excess[:, rank] - level
    return residuals


def _levels(excess: Matrix) -> dict[int, tuple[Matrix, float]]:
    """Of each column whose level changes for a stretch, the level in each step and how much likelier that makes it."""
    edges = np.linspace(0, len(excess), min(len(excess), _BLOCKS) + 1).round().astype(np.intp)
    stretches = find_stretches(block_medians(excess, edges), shortest=1, raised=False)
    found: dict[int, tuple[Matrix, float]] = {}
    for rank in np.flatnonzero(stretches.explained > _LEAST_EXPLAINED) if stretches is not None else ():
        known = np.flatnonzero(~np.isnan(excess[:, rank]))
        if stretches is None or len(known) < _LEAST_STEPS:
            continue
        values = excess[known, rank]
        first, end = np.searchsorted(known, [edges[stretches.first[rank]], edges[stretches.end[rank]]])
        first, end = refine(values, int(first), int(end), len(values) // _BLOCKS)
        inside, outside = np.median(values[first:end]), np.median(np.delete(values, slice(first, end)))
        levels = np.where((np.arange(len(values)) >= first) & (np.arange(len(values)) < end), inside, outside)
        # Half the logarithm of the number of steps for a level, and a whole one for each end that was looked for, as in
        # the modified information criterion of Zhang and Siegmund (2007).
        looked_for = (first > 0) + (end < len(values))
        gain = _misfit(values - np.median(values)) - _misfit(values - levels)
        if gain > (0.5 + looked_for) * np.log(len(values)):
            everywhere = np.full(len(excess), outside)
            everywhere[known[first] : known[end - 1] + 1] = inside
            found[int(rank)] = everywhere, gain
    return found


def quiet_noises(excess: Matrix, residuals: Matrix) -> Matrix:
    """Standard deviation of each rank's noise apart from steps in which it, or another, is late now and then.

    Late steps widen the upper side of a rank's own lateness, and the lower side of that of the others, against whom
    it is measured. So each rank is measured by what is usual, or by its lower side if that is clearly larger.

    Args:
        excess: lateness of each rank, shape (steps, ranks).
        residuals: the same without levels. Late steps that crowd may have passed for a level, and a level may have
            passed for noise, so the quieter of the two counts.

    Returns:
        shape (ranks,).
    """
    whole = np.nan_to_num(MAD_TO_SIGMA * median(np.abs(residuals)))
    below = np.minimum(_side_noises(residuals), _side_noises(excess))
    usual = float(np.median(np.minimum(whole, np.minimum(below, _side_noises(-residuals)))))
    return np.maximum(below / _TOLERANCE, max(usual, 1.0))


def _side_noises(residuals: Matrix) -> Matrix:
    """Standard deviation of each rank's noise, were it normal, by its quantiles of 10 and 30 %."""
    ordered, last = np.sort(residuals, axis=0), np.maximum(np.sum(~np.isnan(residuals), axis=0) - 1, 0)
    low, high = (
        np.take_along_axis(ordered, np.floor(share * last).astype(np.intp)[None], axis=0)[0] for share in (0.1, 0.3)
    )
    return np.asarray(np.nan_to_num((high - low) / _TENTH_TO_THIRD))


def _misfit(values: Matrix) -> float:
    """Minus the logarithm of the likelihood of ``values``, shape (steps,), as first-order autoregressive noise.

    Innovations follow Student's t with three degrees of freedom, so that outliers do not decide; their scale is the
    likeliest one, found by its fixed-point equation.
    """
    scale = MAD_TO_SIGMA * float(np.median(np.abs(values)))
    bounded = np.clip(values, -_WINSOR_SIGMAS * scale, _WINSOR_SIGMAS * scale)
    power = float(bounded[:-1] @ bounded[:-1])
    correlation = float(bounded[1:] @ bounded[:-1]) / power if power > 0 else 0.0
    squares = (values[1:] - correlation * values[:-1]) ** 2
    scale = max(float(np.median(squares)), 1.0)
    for _ in range(_SCALE_ITERATIONS):
        scale = max(float(np.mean(4 * squares / (3 + squares / scale))), 1.0)
    return float(len(squares) / 2 * np.log(scale) + 2 * np.sum(np.log1p(squares / (3 * scale))))
