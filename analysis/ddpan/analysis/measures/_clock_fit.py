"""Fitting clocks: straight lines through the differences between the moments at which ranks leave a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ._inference import MAD_TO_SIGMA, Matrix, block_medians, mean_interval, median

__all__ = ["LEAST_MEETINGS", "RESOLUTION_NS", "Lines", "fit_lines"]

LEAST_MEETINGS: Final = 8
"""Collectives that two ranks must share for their clocks to be compared."""

RESOLUTION_NS: Final = 1000.0
"""No alignment is claimed to be better than this: reading a clock and storing the result takes about as long."""

_MOST_BLOCKS: Final = 32
_LEAST_COVERAGE: Final = 0.5


@dataclass(frozen=True)
class Lines:
    """How the clocks of some ranks run on that of one of them, the anchor; each array of shape (ranks,).

    When the anchor's clock reads ``x`` since its base, that of a rank reads ``x + shift_ns + drift * x`` since its own.
    NaN where a rank shares too few collectives with the others.

    Attributes:
        shift_ns: see above.
        drift: see above.
        meetings: collectives that the rank shares with another one.
        exit_ns: how far from the middle of all ranks it leaves a collective, as a robust standard deviation.
        error_ns: half width of the error of its line anywhere in the run: ``exit_ns``, since a habit of leaving early
            or late cannot be told from a clock that is ahead or behind, and the uncertainty of the fit.
        drift_error: half width of the error of the drift; the habit may come up during the run.
    """

    shift_ns: Matrix
    drift: Matrix
    meetings: Matrix
    exit_ns: Matrix
    error_ns: Matrix
    drift_error: Matrix


def fit_lines(end_ns: Matrix, anchor: int) -> Lines:
    """Fit the clocks of the ranks of one group.

    All ranks are first compared with the most punctual one. The median of the moments at which they then seem to have
    left a collective is a clock without anybody's delays; each rank is compared with that one.

    Args:
        end_ns: when each rank left each collective, since its base, shape (collectives, ranks), NaN where unknown.
        anchor: column of the anchor, on whose clock the result is.
    """
    rough = _fits(end_ns[:, _most_punctual(end_ns)], end_ns)
    shift, drift = (np.array([getattr(one, name) for one in rough]) for name in ("shift_ns", "drift"))
    together = median((end_ns - shift) / (1 + drift), axis=1)
    together[np.sum(~np.isnan(end_ns[:, ~np.isnan(shift)]), axis=1) < 2] = np.nan
    fits = _fits(together, end_ns)
    names = ("shift_ns", "drift", "meetings", "exit_ns", "error_ns", "drift_error")
    shift, drift, meetings, exits, error, drift_error = (
        np.array([getattr(one, name) for one in fits], np.float64) for name in names
    )
    return Lines(
        shift_ns=shift - shift[anchor] * (1 + drift) / (1 + drift[anchor]),
        drift=(1 + drift) / (1 + drift[anchor]) - 1,
        meetings=meetings,
        exit_ns=exits,
        error_ns=error,
        drift_error=drift_error,
    )


@dataclass(frozen=True)
class _Fit:
    shift_ns: float
    drift: float
    meetings: int
    exit_ns: float
    error_ns: float
    drift_error: float


def _most_punctual(end_ns: Matrix) -> int:
    """Column of the rank whose times from collective to collective differ least from the median of all ranks'.

    It has recorded at least half as many as any other. Which rank that is does not depend on their order.
    """
    known = np.sum(~np.isnan(end_ns), axis=0)
    passed = np.diff(end_ns, axis=0)
    beside = passed - median(passed, axis=1)[:, None]
    jitter = median(np.abs(beside - median(beside)))
    return int(np.where(known >= _LEAST_COVERAGE * known.max(), np.nan_to_num(jitter, nan=np.inf), np.inf).argmin())


def _fits(clock_ns: Matrix, end_ns: Matrix) -> list[_Fit]:
    return [_fit(clock_ns, end_ns[:, rank]) for rank in range(end_ns.shape[1])]


def _fit(clock_ns: Matrix, end_ns: Matrix) -> _Fit:
    """Fit a rank's ``end_ns`` on the readings of another clock, both of shape (collectives,).

    The slope is Theil and Sen's through medians of consecutive collectives: a rank may leave one collective in four
    arbitrarily late without moving it.
    """
    from scipy.stats import theilslopes

    known = ~np.isnan(clock_ns) & ~np.isnan(end_ns)
    count = int(known.sum())
    if count < LEAST_MEETINGS:
        return _Fit(np.nan, np.nan, count, np.nan, np.nan, np.nan)
    clock, ahead = clock_ns[known], (end_ns - clock_ns)[known]
    edges = np.linspace(0, count, min(count, _MOST_BLOCKS) + 1).round().astype(np.intp)
    blocks = block_medians(np.column_stack([clock, ahead]), edges)
    slope, _, low, high = theilslopes(blocks[:, 1], blocks[:, 0])
    left = ahead - slope * clock
    shift = float(np.median(left))
    exit_ns = MAD_TO_SIGMA * float(np.median(np.abs(left - shift)))
    span = float(clock.max() - clock.min())
    if span <= 0:
        return _Fit(np.nan, np.nan, count, np.nan, np.nan, np.nan)
    level = mean_interval(blocks[:, [1]] - slope * blocks[:, [0]])
    habit = RESOLUTION_NS + exit_ns
    tilt = float(high - low) / 2
    error = habit + float(level.high[0] - level.middle[0]) + tilt * span / 2
    return _Fit(shift, float(slope), count, exit_ns, error, tilt + habit / span)
