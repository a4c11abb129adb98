"""The stretch of a series in which its level is raised: where it begins, where it ends, and whether it is real."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._inference import Matrix, median

__all__ = ["Stretches", "change_p_values", "exceedance_p_values", "find_stretches", "refine"]


@dataclass(frozen=True)
class Stretches:
    """The best stretch of each column: rows ``first`` to before ``end``; each array of shape (columns,).

    Attributes:
        first: first row of the stretch.
        end: row after its last.
        explained: share of the column's variance that two levels, inside and outside, explain; 0 where no stretch is
            higher than the rest.
        candidates: number of stretches that there were to choose from.
    """

    first: npt.NDArray[np.intp]
    end: npt.NDArray[np.intp]
    explained: Matrix
    candidates: int


def find_stretches(rows: Matrix, *, shortest: int, raised: bool = True) -> Stretches | None:
    """The stretch of each column whose mean is most clearly above that of the rest, by least squares.

    Args:
        rows: values, shape (rows, columns); NaN counts as the column's median.
        shortest: rows that stretch and rest must have at least.
        raised: whether only stretches above the rest are looked for, not those below.

    Returns:
        the stretches, or None if there are too few rows for any.
    """
    count = rows.shape[0]
    first, end = np.triu_indices(count + 1, shortest)
    fits = count - (end - first) >= shortest
    first, end = first[fits], end[fits]
    if len(first) == 0:
        return None
    filled = np.where(np.isnan(rows), median(rows), rows)
    centred = filled - filled.mean(axis=0)
    sums = np.vstack([np.zeros(rows.shape[1]), np.cumsum(centred, axis=0)])
    inside = sums[end] - sums[first]
    inside = np.maximum(inside, 0.0) if raised else inside
    length = (end - first)[:, None]
    between = inside**2 * count / (length * (count - length))
    best = between.argmax(axis=0)
    total = np.sum(centred**2, axis=0)
    score = between[best, np.arange(rows.shape[1])]
    explained = np.divide(score, total, out=np.zeros_like(score), where=total > 0)
    return Stretches(first[best], end[best], explained, len(first))


def change_p_values(rows: int, stretches: Stretches) -> Matrix:
    """Chance of two levels explaining so much of a column of ``rows`` independent normal values, shape (columns,).

    Student's test of inside against outside, multiplied by the number of stretches that there were to choose from.
    """
    from scipy.special import stdtr

    freedom = rows - 2
    left = np.maximum(1 - stretches.explained, np.finfo(np.float64).tiny)
    tail = stdtr(freedom, -np.sqrt(stretches.explained / left * freedom))
    return np.asarray(np.minimum(1.0, tail * stretches.candidates))


def exceedance_p_values(rows: Matrix, scale: Matrix, stretches: Stretches | None) -> Matrix:
    """Chance of a stretch of independent rows so far above zero in a column of noise, shape (columns,).

    Three quarters of the rows of a stretch, or of all rows, reach some level. A row of noise does so as often as the
    rows of the other columns do, but no more seldom than Student's t with three degrees of freedom times ``scale``;
    the number of rows that do is binomial. The result is multiplied by the number of stretches to choose from.

    Args:
        rows: values, shape (rows, columns).
        scale: standard deviation of the noise, shape (columns,).
        stretches: stretches of ``rows``, or None to look at all rows alone.
    """
    whole = _exceedance(rows, rows, scale)
    if stretches is None:
        return whole
    index = np.arange(rows.shape[0])[:, None]
    inside = (stretches.first <= index) & (index < stretches.end)
    part = _exceedance(np.where(inside, rows, np.nan), rows, scale)
    return np.asarray(np.minimum(1.0, np.minimum(whole, part) * (stretches.candidates + 1)))


def refine(values: Matrix, first: int, end: int, reach: int) -> tuple[int, int]:
    """Move the ends of a stretch of ``values``, shape (steps,), by up to ``reach`` steps to where they fit best.

    An end that is the series' own stays there.
    """
    steps = len(values)
    firsts = np.arange(max(0, first - reach), min(steps, first + reach) + 1) if first > 0 else np.array([0])
    ends = np.arange(max(0, end - reach), min(steps, end + reach) + 1) if end < steps else np.array([steps])
    sums = np.concatenate([[0.0], np.cumsum(values - values.mean())])
    length = ends[None, :] - firsts[:, None]
    possible = (length > 0) & (length < steps)
    length = np.where(possible, length, 1)
    between = (sums[ends][None, :] - sums[firsts][:, None]) ** 2 / (length * (steps - length))
    at, to = np.unravel_index(np.where(possible, between, -np.inf).argmax(), between.shape)
    return int(firsts[at]), int(ends[to])


def _exceedance(inside: Matrix, rows: Matrix, scale: Matrix) -> Matrix:
    from scipy.special import betainc, stdtr

    count = np.sum(~np.isnan(inside), axis=0)
    below = count // 4
    position = np.minimum(below, len(inside) - 1)[None, :]
    level = np.nan_to_num(np.take_along_axis(np.sort(inside, axis=0), position, axis=0)[0])
    chance = np.maximum(stdtr(3.0, -level / scale), _share_of_others(rows, level))
    reaching = np.maximum(count - below, 1)
    # P(X >= k) of a binomial with n trials is I_p(k, n - k + 1).
    return np.asarray(np.where(count > 0, betainc(reaching, count - reaching + 1, chance), 1.0))


def _share_of_others(rows: Matrix, level: Matrix) -> Matrix:
    """Share of the values in the other columns that reach the level of each column, shape (columns,)."""
    known = np.sort(rows[~np.isnan(rows)])
    own = np.sum(rows >= level, axis=0)
    reaching = len(known) - np.searchsorted(known, level) - own
    return np.asarray(reaching / np.maximum(len(known) - np.sum(~np.isnan(rows), axis=0), 1))
