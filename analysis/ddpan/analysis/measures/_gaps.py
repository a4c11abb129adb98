"""Counting what is missing: collectives that some rank of a group recorded and another did not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ddpan.collector.schema import OPS, POINT_TO_POINT, Metadata

__all__ = ["Presence"]

_POINT_TO_POINT: Final = [OPS.index(op) for op in POINT_TO_POINT]
_PAGE_BITS = 16
_Group = tuple[int, tuple[int, ...]]


class Presence:
    """Which positions of each group's order were seen, by group, and how many of them by rank.

    Args:
        metadata: metadata by rank; they say which ranks a group has, which tells apart groups of one number.
    """

    def __init__(self, metadata: Mapping[int, Metadata]) -> None:
        self._metadata = metadata
        self._pages: dict[_Group, dict[int, npt.NDArray[np.bool_]]] = {}
        self._counts: dict[_Group, npt.NDArray[np.int64]] = {}

    def add(self, rows: pl.DataFrame) -> None:
        """Note rows of the table ``collectives``; sends and receives, which no other rank has, are passed over."""
        point_to_point = rows["op"].to_physical().is_in(_POINT_TO_POINT)
        if point_to_point.any():
            rows = rows.filter(~point_to_point)
        numbers, ranks, seq = (rows[name].to_numpy() for name in ("group", "rank", "seq"))
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            chosen = numbers == number
            of_number = (ranks, seq) if chosen.all() else (ranks[chosen], seq[chosen])
            self._add_group(number, *of_number)

    def recorded(self, rank: int) -> int:
        """Collectives recorded by ``rank``."""
        return sum(int(counts[rank]) for counts in self._counts.values())

    def missing(self, rank: int) -> int:
        """Collectives that another rank of their group recorded and ``rank`` did not."""
        groups = [group for group in self._counts if rank in group[1]]
        return sum(max(self._seen(group) - int(self._counts[group][rank]), 0) for group in groups)

    def lost_everywhere(self) -> int:
        """Positions between the first and the last of their group that no rank recorded."""
        return sum(self._span(group) - self._seen(group) for group in self._pages)

    def _members(self, rank: int, group: int) -> tuple[int, ...]:
        info = self._metadata[rank]["groups"].get(str(group))
        return tuple(info["ranks"]) if info else tuple(self._metadata)

    def _add_group(self, number: int, ranks: npt.NDArray[np.uint32], seq: npt.NDArray[np.uint64]) -> None:
        present = np.flatnonzero(np.bincount(ranks)).tolist()
        known = [rank for rank in present if rank in self._metadata]
        for members in {self._members(rank, number) for rank in known}:
            own = [rank for rank in known if rank in members]
            chosen = slice(None) if own == present else np.isin(ranks, own)
            self._note((number, members), ranks[chosen], seq[chosen])

    def _note(self, group: _Group, ranks: npt.NDArray[np.uint32], seq: npt.NDArray[np.uint64]) -> None:
        counts = self._counts.setdefault(group, np.zeros(max(self._metadata) + 1, np.int64))
        counts += np.bincount(ranks, minlength=len(counts))
        pages = self._pages.setdefault(group, {})
        page_of = seq >> np.uint64(_PAGE_BITS)
        place = (seq & np.uint64((1 << _PAGE_BITS) - 1)).astype(np.int64)
        first, last = page_of.min(), page_of.max()
        for number in [int(first)] if first == last else np.unique(page_of).tolist():
            page = pages.setdefault(number, np.zeros(1 << _PAGE_BITS, np.bool_))
            page[place if first == last else place[page_of == number]] = True

    def _seen(self, group: _Group) -> int:
        return sum(int(page.sum()) for page in self._pages[group].values())

    def _span(self, group: _Group) -> int:
        pages = self._pages[group]
        low, high = min(pages), max(pages)
        first = (low << _PAGE_BITS) + int(np.argmax(pages[low]))
        last = (high << _PAGE_BITS) + int(np.flatnonzero(pages[high])[-1])
        return last - first + 1
