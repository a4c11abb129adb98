"""Where the level of a series changes: narrowest significant windows of many lengths, tested on medians of blocks.

The windows are those of seeded binary segmentation (Kovacs et al. 2023, *Seeded binary segmentation*), from the whole
series down, each length two thirds of the one before, overlapping by half. Each window is cut into sixteen blocks, and
into eight; the best split of their medians is tested with Student's t, which is valid for heterogeneous and correlated
noise if blocks are long against its memory (Ibragimov and Mueller 2010). Of the windows with a significant split the
narrowest is taken first, because it is the least likely to hold two changes (Baranowski et al. 2019,
*Narrowest-over-threshold detection of multiple change points*).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final

import numpy as np
import numpy.typing as npt

from ._correlation import correlation_times
from ._inference import Matrix

__all__ = ["SHORTEST_WINDOW", "Cut", "find_cuts", "levels"]

SHORTEST_WINDOW: Final = 64
"""Rows that a window must have, and so a series."""

_BLOCKS: Final = (16, 8)
"""Blocks that a window is cut into: many find small changes, few long ones bear noise with a long memory."""

_LEAST_BLOCKS: Final = 3
"""Blocks on either side of a split."""

_SHRINK: Final = 2**-0.5
_LOCAL_REACH: Final = 32
_LOCAL_MEMORIES: Final = 3.0
_REACH: Final = 8
_MEMORIES: Final = 1.5

_Window = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A change of level.

    Attributes:
        at: first row of the new level.
        within: rows that the test compared, the first and the one after the last.
        blocks: blocks that these were cut into.
        p_value: chance of so clear a change anywhere in one series of the same noise without any.
    """

    at: int
    within: _Window
    blocks: int
    p_value: float

    @property
    def block_rows(self) -> float:
        """Rows of a block."""
        return (self.within[1] - self.within[0]) / self.blocks


def find_cuts(values: Matrix, *, significance: float) -> list[tuple[Cut, ...]]:
    """The changes of level of each column.

    A window counts only if its blocks are long against the memory of the noise: three correlation times as a short
    reach shows them, which changes cannot spoil, and one and a half as a long reach shows them in what is left after
    all changes found have been taken out.

    Args:
        values: shape (rows, columns), without NaN.
        significance: p-value of one series below which a change counts.

    Returns:
        for each column its changes in order; none where the series is too short.
    """
    rows, columns = values.shape
    found: list[list[Cut]] = [[] for _ in range(columns)]
    for column, cut in _candidates(values, significance) if rows >= SHORTEST_WINDOW else ():
        found[column].append(cut)
    if not any(found):
        return [()] * columns
    least = _MEMORIES * correlation_times(_without_levels(values, found), reach=rows // _REACH)
    return [
        tuple(_narrowest_first([cut for cut in cuts if cut.block_rows >= shortest]))
        for cuts, shortest in zip(found, least, strict=True)
    ]


def _candidates(values: Matrix, significance: float) -> Iterator[tuple[int, Cut]]:
    """Columns and their significant splits in windows whose blocks are long against the noise's memory."""
    rows = len(values)
    memory = _LOCAL_MEMORIES * correlation_times(values, reach=rows // _LOCAL_REACH)
    layers = _layers(rows)
    for layer, blocks in product(layers, _BLOCKS):
        length = layer[0][1] - layer[0][0]
        tested = np.flatnonzero((length >= blocks * memory) | (length == rows))
        for window in layer if len(tested) else ():
            p_values, cuts = _best_splits(values[slice(*window), tested], blocks)
            p_values = np.minimum(1.0, p_values * len(layer) * len(layers) * len(_BLOCKS))
            for i in np.flatnonzero(p_values < significance):
                yield int(tested[i]), Cut(window[0] + int(cuts[i]), window, blocks, float(p_values[i]))


def levels(values: Matrix, edges: Sequence[int]) -> Matrix:
    """The median between each two ``edges`` at each of their rows, shape (rows,) as ``values``."""
    sizes = np.diff(edges)
    return np.repeat([np.median(values[a:b]) for a, b in pairwise(edges)], sizes)


def _layers(rows: int) -> list[list[_Window]]:
    """Windows of each length, the longest first."""
    layers, length = [], float(rows)
    while length >= SHORTEST_WINDOW:
        count = 1 + int(np.ceil(2 * (rows - length) / length))
        layers.append([(round(begin), round(begin + length)) for begin in np.linspace(0, rows - length, count)])
        length *= _SHRINK
    return layers


def _best_splits(values: Matrix, blocks: int) -> tuple[Matrix, npt.NDArray[np.intp]]:
    """For each column, the chance of so good a split of its blocks, and the row where the best one is."""
    from scipy.special import stdtr

    edges = np.linspace(0, len(values), blocks + 1).round().astype(np.intp)
    medians = np.stack([np.median(block, axis=0) for block in np.split(values, edges[1:-1])])
    centred = medians - medians.mean(axis=0)
    splits = np.arange(_LEAST_BLOCKS, blocks - _LEAST_BLOCKS + 1)
    sums = np.cumsum(centred, axis=0)[splits - 1]
    between = sums**2 * (blocks / (splits * (blocks - splits)))[:, None]
    best = between.argmax(axis=0)
    explained = np.take_along_axis(between, best[None], axis=0)[0]
    left = np.sum(centred**2, axis=0) - explained
    # A series without noise, as a simulation may have, leaves nothing but rounding.
    floor = np.finfo(np.float64).eps * np.maximum(explained, np.finfo(np.float64).tiny)
    score = np.sqrt(explained / np.maximum(left, floor) * (blocks - 2))
    p_values = 2 * stdtr(blocks - 2, -score) * len(splits)
    return np.where(explained > 0, p_values, 1.0), edges[splits[best]]


def _narrowest_first(cuts: Sequence[Cut]) -> list[Cut]:
    """Cuts of the narrowest windows in order; windows that hold a cut already taken are passed over."""
    taken: list[Cut] = []
    for cut in sorted(cuts, key=lambda one: (one.within[1] - one.within[0], one.p_value)):
        if not any(cut.within[0] < other.at < cut.within[1] for other in taken):
            taken.append(cut)
    return sorted(taken, key=lambda cut: cut.at)


def _without_levels(values: Matrix, found: Sequence[Sequence[Cut]]) -> Matrix:
    """What is left of each column without the levels between its cuts."""
    noise = values.copy()
    for column, cuts in enumerate(found):
        edges = [0, *(cut.at for cut in _narrowest_first(cuts)), len(values)]
        noise[:, column] -= levels(values[:, column], edges)
    return noise
