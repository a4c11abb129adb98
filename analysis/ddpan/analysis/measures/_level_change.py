"""The place and the size of changes that were found: before, after, and how sure their difference is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ._inference import Matrix, block_medians, mean_interval
from ._segmentation import Cut

__all__ = ["LevelChange", "measure_changes"]

_SHORTEST_BLOCK: Final = 3


@dataclass(frozen=True)
class LevelChange:
    """A change from one level to the next.

    Attributes:
        begin: first row of the level before.
        at: first row of the level after.
        end: the row after the last of that level.
        blur: rows by which its place may be off.
        before_ns: median of the level before.
        after_ns: median of the level after.
        change_ns: their difference, from medians of blocks.
        change_low_ns: lower end of its 95 % interval; NaN where a level is too short for one.
        change_high_ns: upper end.
        p_value: as that of the `Cut`.
    """

    begin: int
    at: int
    end: int
    blur: int
    before_ns: float
    after_ns: float
    change_ns: float
    change_low_ns: float
    change_high_ns: float
    p_value: float


def measure_changes(
    values_ns: Matrix, cuts: Sequence[Cut], *, rows_per_cut: int, smallest_ns: float
) -> list[LevelChange]:
    """Measure the changes of one series.

    Args:
        values_ns: shape (rows,), without NaN.
        cuts: where it changes.
        rows_per_cut: rows of ``values_ns`` that one row of the cuts stands for.
        smallest_ns: changes that are smaller are dropped, and the levels on both sides taken as one.
    """
    while True:
        rough = [0, *(cut.at * rows_per_cut for cut in cuts), len(values_ns)]
        blurs = [int(np.ceil(cut.block_rows * rows_per_cut)) for cut in cuts]
        places = [_place(values_ns, rough[i : i + 3], blur) for i, blur in enumerate(blurs)]
        edges = [0, *places, len(values_ns)]
        changes = [
            _measure(values_ns, edges[i : i + 3], blur, cut.p_value)
            for i, (blur, cut) in enumerate(zip(blurs, cuts, strict=True))
        ]
        large = [cut for cut, change in zip(cuts, changes, strict=True) if abs(change.change_ns) >= smallest_ns]
        if len(large) == len(cuts):
            return changes
        cuts = large


def _measure(values_ns: Matrix, edges: Sequence[int], blur: int, p_value: float) -> LevelChange:
    begin, at, end = edges
    before, after = values_ns[begin:at], values_ns[at:end]
    # Blocks as long as those of the test, which were found to be long against the memory of the noise.
    sides = [mean_interval(block_medians(side[:, None], _edges(len(side), blur))) for side in (before, after)]
    change = float(sides[1].middle[0] - sides[0].middle[0])
    half = float(np.hypot(*(side.high[0] - side.middle[0] for side in sides)))
    return LevelChange(
        begin=begin,
        at=at,
        end=end,
        blur=blur,
        before_ns=float(np.median(before)),
        after_ns=float(np.median(after)),
        change_ns=change,
        change_low_ns=change - half,
        change_high_ns=change + half,
        p_value=p_value,
    )


def _place(values_ns: Matrix, edges: Sequence[int], blur: int) -> int:
    """The row within ``blur`` of the middle one of ``edges`` that parts best, by the sum of absolute deviations."""
    begin, rough, end = edges
    low, high = max(begin + 1, rough - blur), min(end - 1, rough + blur)
    before, after = np.median(values_ns[begin:rough]), np.median(values_ns[rough:end])
    near = values_ns[low:high]
    gain = np.concatenate([[0.0], np.cumsum(np.abs(near - before) - np.abs(near - after))])
    # Up to the best row values are nearer to the level before; the sum falls there, and rises from there on.
    return low + int(gain.argmin())


def _edges(rows: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    blocks = max(1, rows // max(length, _SHORTEST_BLOCK))
    return np.linspace(0, rows, blocks + 1).round().astype(np.intp)
