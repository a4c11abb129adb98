"""Matching the ranks' collectives: by group and position in the group's order, never by position in a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["Slots", "match"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Slots:
    """The distinct collectives that some rows belong to.

    Attributes:
        rows: the rows that were matched.
        of_row: the slot of each row, shape (rows,).
        steps: step of each slot, shape (slots,).
        buckets: bucket of each slot; its place in the step where several buckets bear the same index.
        layouts: bucket layout of each slot.
        payloads: bytes of each slot on one of its ranks.
        disputed: rows left out because ranks disagree about which bucket their position is.
    """

    rows: pl.DataFrame
    of_row: Integers
    steps: Integers
    buckets: Integers
    layouts: Integers
    payloads: Integers
    disputed: int


def match(rows: pl.DataFrame) -> Slots:
    """Match the bucket rows of several ranks; ``rows`` has the columns of the table ``collectives``."""
    position = _positions(rows["group"].to_numpy(), rows["seq"].to_numpy())
    key = (rows["step"].to_numpy().astype(np.int64) << 16) | rows["bucket"].to_numpy()
    key_at = np.full(int(position.max(initial=-1)) + 1, -1, np.int64)
    key_at[position] = key
    wrong = key_at[position] != key
    if wrong.any():
        agreed = ~np.isin(position, position[wrong])
        rest = match(rows.filter(pl.Series(agreed)))
        return Slots(**{**vars(rest), "disputed": int((~agreed).sum())})
    slots = np.flatnonzero(key_at >= 0)
    number = np.cumsum(key_at >= 0) - 1
    keys = key_at[slots]
    return Slots(
        rows=rows,
        of_row=number[position],
        steps=keys >> 16,
        buckets=_numbered(keys),
        layouts=_of_slots(position, rows["layout"], slots),
        payloads=_of_slots(position, rows["bytes"], slots),
        disputed=0,
    )


def _positions(group: npt.NDArray[Any], seq: npt.NDArray[Any]) -> Integers:
    """A small number for each (group, seq), in their order."""
    if len(seq) == 0:
        return np.zeros(0, np.int64)
    first, last = int(seq.min()), int(seq.max())
    if last - first < 4 * len(seq) + 65536 and group.min() == group.max():
        return np.asarray(seq - seq.dtype.type(first), np.int64)
    order = np.lexsort((seq, group))
    new = np.ones(len(seq), np.bool_)
    new[1:] = (np.diff(seq[order]) != 0) | (np.diff(group[order]) != 0)
    position = np.empty(len(seq), np.int64)
    position[order] = np.cumsum(new) - 1
    return position


def _of_slots(position: Integers, values: pl.Series, slots: Integers) -> Integers:
    at = np.zeros(int(position.max(initial=-1)) + 1, np.int64)
    at[position] = values.fill_null(0).to_numpy()
    return at[slots]


def _numbered(keys: Integers) -> Integers:
    """Bucket of each slot; DDP with static_graph calls all buckets of its first step 0, so there their order counts."""
    buckets = keys & 0xFFFF
    if (np.diff(keys) > 0).all():
        return buckets
    steps = keys >> 16
    unique, counts = np.unique(keys, return_counts=True)
    repeated = np.isin(steps, unique[counts > 1] >> 16)
    order = np.argsort(steps[repeated], kind="stable")
    sorted_steps = steps[repeated][order]
    place = np.arange(len(order)) - np.searchsorted(sorted_steps, sorted_steps)
    numbered = buckets[repeated]
    numbered[order] = place
    buckets[repeated] = numbered
    return buckets
