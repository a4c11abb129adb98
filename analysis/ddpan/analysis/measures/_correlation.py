"""How long noise remembers itself, measured so that a change of level does not pass for memory.

The usual autocorrelation is taken about one mean for the whole series, so a single change of level makes every series
look strongly correlated. The variogram looks at differences between values a lag apart: of those, only the few that
lie across a change are touched by it, and a median hardly sees them (Genton 1998, *Highly robust variogram
estimation*).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ._inference import Matrix

__all__ = ["correlation_times"]

_LAG_GROWTH: Final = 1.4
_SHORTEST_REACH: Final = 4


def correlation_times(values: Matrix, *, reach: int) -> Matrix:
    """Integrated autocorrelation time of each column in rows, 1 or more; of alike columns, no less than their common.

    The variogram V(h) is the squared median distance of values h rows apart. Where it has levelled off, at lags of
    half the reach and more, values have forgotten each other, so 1 - V(h) / V(plateau) is the autocorrelation at h.
    It is summed up to the first lag at which it is not positive.

    Args:
        values: shape (rows, columns), without NaN.
        reach: longest lag in rows. Memory that is longer is underestimated: the result is then about half the reach.

    Returns:
        shape (columns,).
    """
    reach = min(max(reach, _SHORTEST_REACH), len(values) - 1)
    if reach < 1:
        return np.ones(values.shape[1])
    lags = _lags(reach)
    variogram = np.array([np.median(np.abs(values[lag:] - values[:-lag]), axis=0) ** 2 for lag in lags])
    plateau = np.median(variogram[2 * lags >= reach], axis=0)
    correlation = 1 - np.divide(variogram, plateau, out=np.ones_like(variogram), where=plateau > 0)
    common = correlation.mean(axis=1, keepdims=True)
    return np.asarray(np.maximum(_integrated(lags, correlation), _integrated(lags, common)))


def _lags(reach: int) -> npt.NDArray[np.intp]:
    lags = [1]
    while lags[-1] < reach:
        lags.append(min(reach, max(lags[-1] + 1, round(lags[-1] * _LAG_GROWTH))))
    return np.array(lags)


def _integrated(lags: npt.NDArray[np.intp], correlation: Matrix) -> Matrix:
    """One and twice the sum over all lags; each lag that was computed stands for those since the one before."""
    positive = np.cumprod(correlation > 0, axis=0) * correlation
    return np.asarray(1 + 2 * np.sum(positive * np.diff(lags, prepend=0)[:, None], axis=0))
