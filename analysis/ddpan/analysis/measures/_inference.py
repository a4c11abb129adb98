"""Statistics on matrices of one row per step and one column per rank; docs/metrics.md gives the reasons.

Everything takes ``float64`` arrays of shape (steps, ranks) with NaN where a value is missing. Nothing here knows what
the numbers are: times, counts or shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONFIDENCE",
    "MAD_TO_SIGMA",
    "Interval",
    "Matrix",
    "block_edges",
    "block_medians",
    "correlation_steps",
    "excess_over_others",
    "mean_interval",
    "median",
    "place_p_values",
    "row_means",
    "total_p_values",
]

Matrix = npt.NDArray[np.float64]

CONFIDENCE: Final = 0.95
"""Level of every interval."""

MAD_TO_SIGMA: Final = 1.4826
"""Median absolute deviation of a normal variable times this is its standard deviation."""

_WINSOR_SIGMAS: Final = 3.0
_MAX_LAG_SHARE: Final = 4
_BLOCK_CORRELATION_TIMES: Final = 2.0
_SHORTEST_BLOCK: Final = 3


@dataclass(frozen=True)
class Interval:
    """Confidence intervals at level `CONFIDENCE`, one per column; NaN where there are too few values."""

    middle: Matrix
    low: Matrix
    high: Matrix


def median(values: Matrix, axis: int = 0) -> Matrix:
    """Median along ``axis`` over the values that are not NaN; NaN where there are none.

    The same as ``numpy.nanmedian``, without its loop over slices and its warnings.
    """
    if values.shape[axis] == 0:
        return np.full(np.delete(values.shape, axis), np.nan)
    ordered = np.sort(values, axis=axis)
    count = np.expand_dims(np.sum(~np.isnan(values), axis=axis), axis)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[axis] - 1), axis)
    return np.asarray(np.where(count > 0, (low + high) / 2, np.nan).squeeze(axis))


def row_means(values: Matrix) -> Matrix:
    """Mean of each row over the values that are not NaN; NaN where there are none. Shape (rows,)."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.asarray(np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0))


def excess_over_others(values: Matrix) -> Matrix:
    """Each value minus the median of the *other* ranks in the same step, shape (steps, ranks).

    With two ranks this is the difference to the other one. Leaving a rank out of its own reference keeps its delay
    from moving the reference. Steps in which less than half of the ranks, or less than two, have a value are NaN.
    """
    ranks = values.shape[1]
    present = np.sum(~np.isnan(values), axis=1, keepdims=True)
    ordered = np.sort(values, axis=1)

    def other(position: npt.NDArray[np.intp]) -> Matrix:
        here = np.take_along_axis(ordered, np.clip(position, 0, ranks - 1), axis=1)
        above = np.take_along_axis(ordered, np.clip(position + 1, 0, ranks - 1), axis=1)
        return np.where(values <= here, above, here)

    reference = (other((present - 2) // 2) + other((present - 1) // 2)) / 2
    enough = (present >= 2) & (2 * present >= ranks)
    return np.asarray(np.where(enough, values - reference, np.nan))


def correlation_steps(residuals: Matrix) -> float:
    """Integrated autocorrelation time in steps, 1 or more: n steps are worth n / this independent ones.

    The autocorrelation is averaged over ranks, of values winsorised at three robust standard deviations (one outlier
    would otherwise hide it), and summed as long as the sums of adjacent pairs of lags are positive (Geyer 1992,
    *Practical Markov chain Monte Carlo*, initial positive sequence).
    """
    steps = residuals.shape[0]
    scale = MAD_TO_SIGMA * median(np.abs(residuals))
    usable = scale > 0
    if steps < 4 or not usable.any():
        return 1.0
    bounded = np.clip(residuals[:, usable] / scale[usable], -_WINSOR_SIGMAS, _WINSOR_SIGMAS)
    known = ~np.isnan(bounded)
    bounded = np.where(known, bounded - np.nanmean(bounded, axis=0), 0.0)
    lags = max(2, steps // _MAX_LAG_SHARE)
    products = _lagged_products(bounded, lags)
    pairs = _lagged_products(known.astype(np.float64), lags)
    correlation = products / np.maximum(pairs, 1.0)
    return _initial_positive_sum(correlation / correlation[0])


def block_edges(steps: int, correlation: float, *, most: int, shortest: int = _SHORTEST_BLOCK) -> npt.NDArray[np.intp]:
    """Edges of consecutive blocks of nearly equal length, at least two correlation times and ``shortest`` steps each.

    Blocks that long are nearly independent of each other, whatever happens inside them, and the median of three
    steps does not follow a single outlier. There are ``most`` of them at the most; the result has one more entry than
    there are blocks.
    """
    length = max(shortest, int(np.ceil(_BLOCK_CORRELATION_TIMES * correlation)))
    blocks = max(1, min(most, steps // length))
    return np.linspace(0, steps, blocks + 1).round().astype(np.intp)


def block_medians(values: Matrix, edges: npt.NDArray[np.intp]) -> Matrix:
    """Median of each block of steps, shape (blocks, ranks)."""
    return np.stack([median(values[a:b]) for a, b in pairwise(edges)])


def place_p_values(blocks: Matrix) -> Matrix:
    """Chance of a rank's places being this far back if all ranks were alike, shape (ranks,); not adjusted.

    In each block the ranks are ordered, as in a Friedman test. If they are alike, a rank is equally likely to be at
    each place, the last included, whatever the distribution of the noise. The sum of its places over the blocks is
    compared with its exact mean and variance, normal with a correction for continuity.
    """
    from scipy.special import ndtr

    known = ~np.isnan(blocks)
    order = np.argsort(np.argsort(blocks, axis=1), axis=1) + 1.0
    ranks = np.sum(known, axis=1, keepdims=True)
    excess = np.sum(np.where(known, order - (ranks + 1) / 2, 0.0), axis=0)
    variance = np.sum(np.where(known, (ranks**2 - 1) / 12, 0.0), axis=0)
    score = np.divide(excess - 0.5, np.sqrt(variance), out=np.full_like(excess, -np.inf), where=variance > 0)
    return np.asarray(ndtr(-score))


def total_p_values(counts: npt.NDArray[np.intp]) -> Matrix:
    """Chance of each rank's total of ``counts``, shape (blocks, ranks), or a larger one if all ranks were alike.

    If they are, each rank is equally likely to have any of the counts of a block, and blocks are independent: the
    distribution of a total is the convolution of those of the blocks. No distribution is assumed. Shape of the result
    (ranks,); not adjusted.
    """
    chances = np.ones(1)
    for block in counts[counts.any(axis=1)]:
        chances = np.convolve(chances, np.bincount(block) / len(block))
    reaching = np.cumsum(chances[::-1])[::-1]
    return np.asarray(np.minimum(reaching[counts.sum(axis=0)], 1.0))


def mean_interval(blocks: Matrix, *, chosen: Matrix | None = None, unseen: Matrix | None = None) -> Interval:
    """Student's interval for the mean over independent blocks, one per rank.

    Valid for correlated and heterogeneous series if the blocks are independent and roughly normal (Ibragimov and
    Müller 2010, *t-statistic based correlation and heterogeneity robust inference*).

    Args:
        blocks: shape (blocks, ranks).
        chosen: if the ranks are compared with some references out of more: the mean difference to each, shape
            (ranks, references). How much the choice of them matters adds to the variance, with Welch's degrees of
            freedom.
        unseen: share of the possible references that were not chosen, shape (ranks,).
    """
    from scipy.special import stdtrit

    count = np.sum(~np.isnan(blocks), axis=0)
    known = np.where(np.isnan(blocks), 0.0, blocks)
    mean = np.divide(known.sum(axis=0), count, out=np.full(blocks.shape[1], np.nan), where=count > 0)
    squares = np.sum(np.where(np.isnan(blocks), 0.0, (blocks - mean) ** 2), axis=0)
    enough = count > 1
    freedom = np.where(enough, count - 1, 1).astype(np.float64)
    variance = squares / freedom / np.maximum(count, 1)
    if chosen is not None and unseen is not None:
        variance, freedom = _with_choice(variance, freedom, chosen, unseen)
    half = np.where(enough, stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(variance), np.nan)
    return Interval(mean, mean - half, mean + half)


def _with_choice(variance: Matrix, freedom: Matrix, chosen: Matrix, unseen: Matrix) -> tuple[Matrix, Matrix]:
    """Variance and degrees of freedom of a mean over some of all possible references."""
    count = np.sum(~np.isnan(chosen), axis=1)
    deviations = chosen - row_means(chosen)[:, None]
    more = np.maximum(count - 1, 1)
    added = unseen * np.nansum(deviations**2, axis=1) / more / np.maximum(count, 1)
    total = variance + added
    weights = variance**2 / freedom + added**2 / more
    return total, np.divide(total**2, weights, out=freedom.copy(), where=weights > 0)


def _lagged_products(values: Matrix, lags: int) -> Matrix:
    """Sum over ranks and steps of x(s) x(s+k) for the lags k = 0 ... lags - 1, by the Fourier transform."""
    size = 2 * values.shape[0]
    spectrum = np.sum(np.abs(np.fft.rfft(values, size, axis=0)) ** 2, axis=1)
    return np.asarray(np.fft.irfft(spectrum, size)[:lags])


def _initial_positive_sum(correlation: Matrix) -> float:
    even = len(correlation) // 2 * 2
    pairs = correlation[:even].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    kept = pairs[: negative[0]] if len(negative) else pairs
    return max(1.0, float(2 * kept.sum() - 1))
